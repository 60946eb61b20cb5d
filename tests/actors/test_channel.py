"""Channels in memory and frames over a stream."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel, FrameReader, FrameWriter, PeerGone, WireMessage
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.sampling import LogitRules, OutputGrammar, SamplingParams
from quipu.actors.messages.scheduler import Abort, Submit
from quipu.actors.messages.supervisor import EngineReady


async def test_send_and_post_share_one_order() -> None:
    """Items are received in the order in which they were added."""
    channel: Channel[int] = Channel(10)
    await channel.send(1)
    channel.post(2)
    await channel.send(3)
    channel.post(4)
    assert await channel.receive_all() == [1, 2, 3, 4]


async def test_send_waits_post_does_not() -> None:
    """A full channel makes senders wait, in order, and still accepts posted items."""
    channel: Channel[int] = Channel(1)
    await channel.send(0)
    async with trio.open_nursery() as nursery:
        for item in (1, 2):
            nursery.start_soon(channel.send, item)
            await trio.testing.wait_all_tasks_blocked()
        channel.post(9)
        assert len(channel) == 2
        assert await channel.receive_all() == [0, 9]
        await trio.testing.wait_all_tasks_blocked()
        assert await channel.receive_all() == [1]
        await trio.testing.wait_all_tasks_blocked()
        assert await channel.receive_all() == [2]


async def test_cancelled_sender_costs_no_slot() -> None:
    """A sender that is cancelled, or gives its reservation back, leaves the capacity as it was."""
    channel: Channel[int] = Channel(1)
    await channel.reserve()
    with trio.move_on_after(0):
        await channel.send(1)
    channel.cancel_reservation()
    await channel.send(2)
    with trio.move_on_after(0) as scope:
        await channel.send(3)
    assert scope.cancelled_caught
    assert channel.take_nowait() == [2]
    await channel.send(4)
    assert await channel.receive_all() == [4]


async def test_receiver_gets_all_items_at_once() -> None:
    """Everything that is there when the receiver runs is received at once."""
    channel: Channel[int] = Channel(10)
    received: list[list[int]] = []

    async def receive() -> None:
        received.append(await channel.receive_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        for item in range(5):
            channel.post(item)
    assert received == [[0, 1, 2, 3, 4]]


async def test_second_receiver_raises() -> None:
    """A second receiver is an error instead of a race."""
    channel: Channel[int] = Channel(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.receive_all)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await channel.receive_all()
        nursery.cancel_scope.cancel()


def messages() -> list[WireMessage]:
    report = StepReport(
        *(
            1,
            7,
            [1],
            [1],
            [16],
            [16],
            ["none"],
            [16],
            [1, 2],
            [16, 0],
            [50, 9],
            [2],
            [0],
            [16],
            [1],
            [300],
            [1],
            ["length"],
        ),
        *([2], ["a step failed"], ["internal"], 3, 4, 5, 6, 7),
    )
    rules = LogitRules(bias={7: -1.5}, bad_words=((1, 2), (3,)), allowed_token_ids=(7,), min_tokens=2)
    grammar = OutputGrammar("start: /a/", (1,), (2, 3), prompt_opens_reasoning=True)
    sampling = SamplingParams(
        max_tokens=5, temperature=0.7, seed=2**64 - 1, stop_token_ids=(1, 2), rules=rules, grammar=grammar
    )
    return [
        EngineReady(1, 64, 16, "fake", "none"),
        Submit(2**40, list(range(2000)), b"r" * 32, [bytes([i]) * 32 for i in range(100)], sampling),
        Abort(3),
        report,
    ]


async def test_frames_survive_any_split() -> None:
    """Messages are equal after transfer, however the stream splits them."""
    chance = random.Random(1)
    for _ in range(20):
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        writer, reader = FrameWriter(ours, 5), FrameReader(theirs, 5)
        data = b"".join(map(writer.encode, messages()))
        received: list[WireMessage] = []
        async with trio.open_nursery() as nursery:

            async def write(data: bytes = data, ours: trio.abc.SendStream = ours) -> None:
                at = 0
                while at < len(data):
                    size = chance.choice((1, 7, 100, 5000))
                    await ours.send_all(data[at : at + size])
                    at += size
                    await trio.lowlevel.checkpoint()
                await ours.aclose()

            nursery.start_soon(write)
            with pytest.raises(PeerGone):
                while True:
                    received += await reader.receive_all()
        assert received == messages()


def frames_of(*messages: WireMessage) -> tuple[FrameWriter, bytes]:
    ours, _ = trio.testing.memory_stream_one_way_pair()
    writer = FrameWriter(ours, 1)
    return writer, b"".join(map(writer.encode, messages))


async def test_shared_prompt_is_sent_once() -> None:
    """This holds with other requests in between. Lists that are equal but not identical are sent completely."""
    one, other, equal = list(range(9000)), list(range(5, 9000)), list(range(9000))
    keys: list[bytes] = [b"k" * 32]
    sampling = SamplingParams(max_tokens=5)

    def submit(number: int, prompt: list[int], group_id: int, to_come: int) -> Submit:
        return Submit(number, prompt, b"r", keys, sampling, group_id=group_id, num_to_come=to_come)

    sent = [
        *(submit(1, one, 1, 3), submit(5, other, 5, 2), submit(2, one, 1, 2), submit(6, other, 5, 1)),
        *(submit(3, equal, 1, 1), submit(4, equal, 1, 0), submit(7, other, 5, 0), submit(8, one, 0, 0)),
    ]
    writer, data = frames_of(*sent)
    whole = [len(frames_of(each)[1]) for each in sent]
    assert len(data) < sum(whole) - 4 * min(whole) + 4 * 400, "four of the eight must be sent without their prompt"
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(data)
    reader = FrameReader(theirs, 1)
    received = [each for each in await reader.receive_all() if isinstance(each, Submit)]
    assert received == sent
    assert received[0].prompt_token_ids is received[2].prompt_token_ids
    assert received[4].prompt_token_ids is received[5].prompt_token_ids is not received[0].prompt_token_ids
    assert len(writer._prompts) == len(reader._prompts) == 0, "nothing must be kept after the last choice"


async def test_prompt_is_forgotten_after_abort() -> None:
    """If a request ends before its last choice was sent, both ends forget its prompt."""
    first = Submit(1, [1, 2, 3], b"r", [], SamplingParams(max_tokens=5), group_id=1, num_to_come=9)
    writer, data = frames_of(first, Abort(1), Abort(1, ends_group=True))
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(data)
    reader = FrameReader(theirs, 1)
    assert await reader.receive_all() == [first, Abort(1), Abort(1, ends_group=True)]
    assert len(writer._prompts) == len(reader._prompts) == 0


async def test_frames_of_another_incarnation_are_dropped() -> None:
    """No engine receives another incarnation's frames, and none of its own outdated frames are delivered."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await FrameWriter(ours, 1).send_all([Abort(1)])
    await FrameWriter(ours, 2).send_all([Abort(2)])
    assert await FrameReader(theirs, 2).receive_all() == [Abort(2)]


async def test_invalid_frame_length() -> None:
    """A length that no frame can have ends the connection instead of filling the memory."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(b"\xff" * 16)
    with pytest.raises(PeerGone):
        await FrameReader(theirs, 1).receive_all()


async def test_writing_to_a_dead_peer() -> None:
    """The writer raises PeerGone as well."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await theirs.aclose()
    with pytest.raises(PeerGone):
        await FrameWriter(ours, 1).send_all([Abort(1)])
