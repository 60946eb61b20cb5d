"""Frames over a stream: whole, cut and invalid ones."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio
import trio.testing

from quipu.actors.fleet import frames
from quipu.actors.fleet.frames import (
    PART_IDS,
    PROMPT_PART,
    SUBMIT_AGAIN,
    FrameReader,
    FrameWriter,
    PeerGone,
    Unreadable,
    WireMessage,
)
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.sampling import LogitRules, OutputGrammar, SamplingParams
from quipu.actors.messages.scheduler import Abort, Submit
from quipu.actors.messages.supervisor import EngineReady, Heartbeat


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
        LookUp(7, list(range(PART_IDS + 1)), b"r" * 32, []),
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
    """The prompt of a request with several sequences is sent once, even with other requests in between. Lists that are
    equal but not identical are sent completely."""
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
    assert len(data) < sum(whole) - 4 * min(whole) + 4 * 500, "four of the eight must be sent without their prompt"
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(data)
    reader = FrameReader(theirs, 1)
    received = [each for each in await reader.receive_all() if isinstance(each, Submit)]
    assert received == sent
    assert received[0].prompt_token_ids is received[2].prompt_token_ids
    assert received[4].prompt_token_ids is received[5].prompt_token_ids is not received[0].prompt_token_ids
    assert len(writer._prompts) == len(reader._prompts) == 0, "nothing must be kept after the last choice"


async def test_sequences_of_tokens_are_sent_once() -> None:
    """If each sequence of a report has one span and one token, their ids are sent once; if a sequence has several
    tokens, or none, both lists are sent."""
    ids = list(range(1000, 1064))
    report = next(message for message in messages() if isinstance(message, StepReport))
    spans = {"span_ids": ids, "span_starts": ids, "span_ends": ids}
    whole = msgspec.structs.replace(report, **spans, token_sequence_ids=list(ids), token_ids=list(ids))
    several = msgspec.structs.replace(whole, token_sequence_ids=[*whole.span_ids, 64], token_ids=[*whole.token_ids, 7])
    fewer = msgspec.structs.replace(whole, token_sequence_ids=whole.span_ids[1:], token_ids=whole.token_ids[1:])
    none = msgspec.structs.replace(whole, token_sequence_ids=[], token_ids=[])
    sent = [whole, several, fewer, none]
    lengths = [len(frames_of(report)[1]) for report in sent]
    assert lengths[0] < lengths[2] - 60
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(frames_of(*sent)[1])
    assert await FrameReader(theirs, 1).receive_all() == sent


async def test_prompt_is_forgotten_after_abort() -> None:
    """If a request ends before its last choice was sent, both ends forget its prompt."""
    first = Submit(1, [1, 2, 3], b"r", [], SamplingParams(max_tokens=5), group_id=1, num_to_come=9)
    writer, data = frames_of(first, Abort(1), Abort(1, ends_group=True))
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(data)
    reader = FrameReader(theirs, 1)
    assert await reader.receive_all() == [first, Abort(1), Abort(1, ends_group=True)]
    assert len(writer._prompts) == len(reader._prompts) == 0


async def read_to_the_end(data: bytes, incarnation: int = 5) -> tuple[list[WireMessage], Exception]:
    """Return the messages read from a stream of these bytes, and the error that ended reading."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await ours.send_all(data)
    await ours.aclose()
    reader, received = FrameReader(theirs, incarnation), list[WireMessage]()
    try:
        while True:
            received += await reader.receive_all()
    except (PeerGone, Unreadable) as error:
        return received, error


async def test_cut_at_every_byte() -> None:
    """However a stream is cut, its complete messages are read before its end is reported."""
    writer = FrameWriter(trio.testing.memory_stream_one_way_pair()[0], 5)
    sent = [EngineReady(1, 64, 16, "fake", "none"), Abort(3), messages()[3]]
    frames = [writer.encode(message) for message in sent]
    data, ends = b"".join(frames), [sum(map(len, frames[: at + 1])) for at in range(len(frames))]
    for length in range(len(data) + 1):
        received, error = await read_to_the_end(data[:length])
        assert isinstance(error, PeerGone) and received == sent[: sum(end <= length for end in ends)]


def frame(number: int, body: bytes, incarnation: int = 5, length: int | None = None) -> bytes:
    return struct.pack("<IIH", 6 + len(body) if length is None else length, incarnation, number) + body


NOT_A_MESSAGE = {
    "frame that is too long": frame(2, b"", length=2**32 - 1),
    "frame that is too short": frame(2, b"", length=5),
    "empty frame": bytes(64),
    "later incarnation": frame(2, msgspec.msgpack.encode(Abort(1)), 6),
    "frame of an earlier incarnation that is too short": frame(2, b"", 4, length=5),
    "unknown type": frame(99, b"\x80"),
    "no body": frame(4, b""),
    "body that is not msgpack": frame(8, b"\xc1" * 9),
    "more than a body": frame(8, msgspec.msgpack.encode(Heartbeat(1, 1.0)) + b"\0"),
    "body of a wrong type": frame(4, msgspec.msgpack.encode(Heartbeat(1, 1.0))),
    "text that is not UTF-8": frame(6, b"\x81\xa6reason\xa2\xff\xff"),
    "list of four billion items": frame(4, b"\xdd\xff\xff\xff\xff"),
    "very deep body": frame(6, b"\x91" * 100_000),
    "part of a prompt of no message": frame(PROMPT_PART, msgspec.msgpack.encode([1, 2])),
    "part of a prompt that is none": frame(PROMPT_PART, msgspec.msgpack.encode(["x"])),
    "part of a prompt whose message has one": frame(PROMPT_PART, msgspec.msgpack.encode([1]))
    + frame(1, msgspec.msgpack.encode(Submit(1, [1], b"", [], SamplingParams(max_tokens=1)))),
    "shared prompt that nobody sent": frame(
        SUBMIT_AGAIN, msgspec.msgpack.encode(Submit(1, [], b"", [], SamplingParams(max_tokens=1), group_id=7))
    ),
}


@pytest.mark.parametrize("data", NOT_A_MESSAGE.values(), ids=NOT_A_MESSAGE)
async def test_not_a_message(data: bytes) -> None:
    """An invalid frame is an error after the messages before it were returned; nothing after it is read."""
    good = FrameWriter(trio.testing.memory_stream_one_way_pair()[0], 5).encode(Abort(3))
    received, error = await read_to_the_end(good + data + good)
    assert received == [Abort(3)] and isinstance(error, Unreadable)


async def test_parts_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts of one prompt take in memory is bounded, as one frame is."""
    monkeypatch.setattr(frames, "MAX_PARTS_IDS", 5)
    part = frame(PROMPT_PART, msgspec.msgpack.encode([1, 2, 3]))
    received, error = await read_to_the_end(part + part)
    assert received == [] and isinstance(error, Unreadable) and "more than 5 tokens" in str(error)


async def test_stale_frames() -> None:
    """Frames of earlier incarnations are counted and skipped, whatever they contain and wherever they are cut."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    stale: list[int] = []
    reader = FrameReader(theirs, 5, stale.append)
    good = frame(2, msgspec.msgpack.encode(Abort(3)))
    old = frame(2, msgspec.msgpack.encode(Abort(1)), 4) + frame(99, b"\x80", 1)
    received: list[WireMessage] = []

    async def receive() -> None:
        while True:
            received.extend(await reader.receive_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for at in range(len(old)):
            await ours.send_all(good + old[:at])
            await trio.testing.wait_all_tasks_blocked()
            await ours.send_all(old[at:] + good)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert received == [Abort(3)] * 2 * len(old)
    assert sum(stale) == 2 * len(old)


async def test_changed_bytes() -> None:
    """Whatever bytes change on the way, reading raises PeerGone or Unreadable, and nothing else."""
    chance = random.Random(1)
    writer = FrameWriter(trio.testing.memory_stream_one_way_pair()[0], 5)
    whole = writer.encode(messages()[0]) + writer.encode(messages()[3])
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 2, 20))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        received, _ = await read_to_the_end(bytes(data))
        assert all(isinstance(message, WireMessage) for message in received)


async def test_writing_to_a_dead_peer() -> None:
    """Writing to a closed stream raises PeerGone."""
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    await theirs.aclose()
    with pytest.raises(PeerGone):
        await FrameWriter(ours, 1).send_all([Abort(1)])


async def test_socket_that_ends_while_it_is_read() -> None:
    """A reader that waits on a socket raises PeerGone if the peer resets or closes it, or if its own end is closed."""

    async def fault_after(end: Callable[[trio.SocketStream, trio.SocketStream], Awaitable[object]]) -> str:
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        async with listener:
            theirs = await trio.open_tcp_stream(*listener.socket.getsockname())
            ours = await listener.accept()
        reader, faults = FrameReader(ours, 1), list[str]()
        async with theirs, ours:
            await theirs.send_all(frames_of(Abort(7))[1])
            assert await reader.receive_all() == [Abort(7)]

            async def read() -> None:
                with pytest.raises(PeerGone) as caught:
                    await reader.receive_all()
                faults.append(str(caught.value))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                await end(ours, theirs)
            with pytest.raises(PeerGone):
                await reader.receive_all()
        return faults[0]

    async def reset(_: trio.SocketStream, theirs: trio.SocketStream) -> None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await theirs.aclose()

    assert await fault_after(reset) == "the stream is broken"
    assert await fault_after(lambda _, theirs: theirs.aclose()) == "end of file"
    assert await fault_after(lambda ours, _: ours.aclose()) == "the stream is broken"
