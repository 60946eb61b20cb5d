"""Transfers between two engines with a fault at every message: the text stays the same, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import msgspec
import pytest
import trio
import trio.testing

from quipu.actors.engine.peers.peer_link import (
    Emptied,
    Hello,
    Here,
    Hurry,
    Kept,
    LinkLost,
    LoopLink,
    LoopNetwork,
    Over,
    PeerLink,
    PeerMessage,
    Want,
)
from quipu.actors.messages.peers import EndFetch
from quipu.kernels.fake import FakeBackend
from tests.actors.engine.engine_pairs import Side, open_sides
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import eventually
from tests.tiny import BLOCK

PROMPT = [*prompt_of(13 * BLOCK, seed=1), 7, 8, 9]
FAULTS = ("cut before", "cut after", "lost", "stands still", "late")


@pytest.fixture(autouse=True, params=[True, False], ids=["one copy", "buffers"])
def can_share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the decode side copies from the prefill side's cache, or from buffers that both share."""
    monkeypatch.setattr(LoopLink, "can_share", request.param)
    return bool(request.param)


@attrs.define(eq=False)
class FaultyLink(LoopLink):
    """An end of a connection that misbehaves at one of the messages that the network's ends send."""

    network: FaultyNetwork = attrs.field(kw_only=True)
    is_stopped: bool = False

    async def send(self, message: PeerMessage) -> None:
        self.network.sent.append(message)
        is_due = len(self.network.sent) == self.network.at
        fault = self.network.fault if is_due else ""
        if self.is_stopped or fault == "stands still":
            self.is_stopped = True
            return
        if fault == "cut before":
            await self.close()
            raise LinkLost("cut")
        if fault == "lost":
            return
        if fault == "late":
            await trio.sleep(1)
        await super().send(message)
        if fault == "cut after":
            await self.close()


@attrs.define(eq=False, init=False)
class FaultyNetwork(LoopNetwork):
    fault: str
    at: int
    """Which message; 0: none."""
    sent: list[PeerMessage]

    def __init__(self, fault: str = "", at: int = 0) -> None:
        super().__init__()
        self.fault, self.at, self.sent = fault, at, []

    def is_after(self, num_messages: int) -> bool:
        """Return whether so many were sent, or the last one."""
        return len(self.sent) >= num_messages or any(isinstance(message, Over) for message in self.sent)

    def make_link(
        self,
        sends: trio.MemorySendChannel[PeerMessage],
        receives: trio.MemoryReceiveChannel[PeerMessage],
        buffers: list[memoryview],
    ) -> LoopLink:
        return FaultyLink(sends, receives, buffers, network=self)


async def move_once(network: FaultyNetwork, *, is_ahead: bool) -> None:
    """Prefill on one engine and decode on another, twice; check the texts and that nothing is left."""
    async with open_sides(2, network) as (prefill, decode):
        for sequence_id, prompt in ((1, PROMPT), (2, [3, *PROMPT])):
            first = await prefill.submit(sequence_id, prompt, ends_after_prefill=True)
            if is_ahead:
                await decode.fetch(sequence_id, prompt, prefill.peer)
            await first.over.wait()
            rest = await decode.serve(
                sequence_id, prompt, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer
            )
            assert first.tokens + rest.tokens == continuation(prompt, 6)
            assert all(admitted.reused == admitted.read for admitted in rest.admissions)
            assert rest.error is None
        await at_rest(prefill, decode)


async def at_rest(*sides: Side) -> None:
    await trio.sleep(60)  # any patience is over
    for side in sides:
        side.check()


async def count_messages(*, is_ahead: bool) -> int:
    network = FaultyNetwork()
    await move_once(network, is_ahead=is_ahead)
    return len(network.sent)


async def count_messages_of_fetch() -> int:
    """Count the messages of one prompt whose sequence does not come."""
    network = FaultyNetwork()
    async with open_sides(2, network) as (prefill, decode):
        await prefill.submit(1, PROMPT, ends_after_prefill=True)
        await decode.fetch(1, PROMPT, prefill.peer)
        await at_rest(prefill, decode)
    return len(network.sent)


@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "afterwards"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_at_every_message(fault: str, autojump_clock: trio.testing.MockClock, *, is_ahead: bool) -> None:
    num_messages = await count_messages(is_ahead=is_ahead)
    assert num_messages > 8
    for at in range(1, num_messages + 1):
        await move_once(FaultyNetwork(fault, at), is_ahead=is_ahead)


HOSTILE: dict[str, Callable[[PeerMessage], PeerMessage]] = {
    "other keys": lambda m: changed(m, Here, keys=[bytes(32)]),
    "other place": lambda m: changed(m, Here, first=3),
    "more than wanted": lambda m: changed(m, Here, keys=[bytes(32)] * 99),
    "no keys": lambda m: changed(m, Here, keys=[]),
    "other numerics": lambda m: changed(m, Hello, numerics="other"),
    "small buffers": lambda m: changed(m, Hello, buffer_bytes=1),
    "request twice": lambda m: changed(m, Hurry, number=-1),
    "buffer it did not have": lambda m: changed(m, Emptied, buffer=77),
    "keys of another length": lambda m: changed(m, Want, keys=[b"short", bytes(32)]),
    "places of others": lambda m: changed(m, Here, blocks=[1 << 40] * len(getattr(m, "keys", ()))),
    "places before the first": lambda m: changed(m, Here, blocks=[-1] * len(getattr(m, "keys", ()))),
    "fewer places": lambda m: changed(m, Here, blocks=[1]),
    "half a cache": lambda m: changed(m, Hello, cache_bytes=BLOCK * 8 + 1),
    "nothing was kept": lambda m: changed(m, Kept, num_blocks=-1),
    "answer to a request": lambda m: Over(1) if isinstance(m, Want) else m,
}


def changed(message: PeerMessage, kind: type, **fields: object) -> PeerMessage:
    """Return a message with other fields if it is of this kind."""
    if not isinstance(message, kind):
        return message
    new: PeerMessage = msgspec.structs.replace(message, **fields)
    return new


@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_peer(what: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that sends nonsense gets nothing, and nothing of it is used."""
    plain = LoopLink.send

    async def send(self: LoopLink, message: PeerMessage) -> None:
        await plain(self, HOSTILE[what](message))

    monkeypatch.setattr(LoopLink, "send", send)
    with trio.fail_after(3600):
        await move_once(FaultyNetwork(), is_ahead=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_engine_ends_at_every_message(side: str, autojump_clock: trio.testing.MockClock) -> None:
    """If either engine ends in the middle of a transfer, the other one goes on, and holds nothing for it."""
    num_messages = await count_messages_of_fetch()
    assert num_messages > 4
    for at in range(1, num_messages + 1):
        network = FaultyNetwork()
        async with open_sides(3, network) as (prefill, decode, third):
            dying, left = (prefill, decode) if side == "prefill" else (decode, prefill)
            first = await prefill.submit(1, PROMPT, ends_after_prefill=True)
            await decode.fetch(1, PROMPT, prefill.peer)
            peer = prefill.peer
            await eventually(partial(network.is_after, at), "so many messages", within_s=50)
            dying.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            tokens = first.tokens if first.over.is_set() or side == "decode" else []
            if side == "decode":
                await first.over.wait()
            elsewhere = decode if side == "prefill" else third
            fields = {"output_token_ids": tokens, "peer": peer} if tokens else {}
            rest = await elsewhere.serve(1, PROMPT, is_resumed=True, **fields)
            assert [*tokens, *rest.tokens][:6] == continuation(PROMPT, 6)
            await at_rest(left, elsewhere)


async def test_silent_peer_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """A sequence waits for a peer that sends nothing for a bounded time only."""
    network = FaultyNetwork("stands still", 3)
    begun = trio.current_time()
    await move_once(network, is_ahead=False)
    assert trio.current_time() - begun < 60 + 2 * 30 + 10
    assert Want in map(type, network.sent)


class SlowNetwork(FaultyNetwork):
    """Takes three seconds to connect."""

    async def connect(self, address: str) -> PeerLink:
        await trio.sleep(3)
        return await super().connect(address)


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_arrives_while_it_is_connected(at: int, autojump_clock: trio.testing.MockClock) -> None:
    """A sequence that comes before its fetch has a connection waits for a silent peer no longer than others."""
    begun = trio.current_time()
    await move_once(SlowNetwork("stands still", at), is_ahead=True)
    assert trio.current_time() - begun < 60 + 2 * 40


class Unreachable(FaultyNetwork):
    """Connects to nobody, and does not say so."""

    num_attempts = 0

    async def connect(self, address: str) -> PeerLink:
        self.num_attempts += 1
        await trio.sleep_forever()
        raise AssertionError


async def test_unreachable_peer_is_left_alone(autojump_clock: trio.testing.MockClock) -> None:
    """An engine that cannot be reached delays the prompts of one attempt; the next one follows much later."""
    network = Unreachable()
    async with open_sides(2, network) as (prefill, decode):
        for sequence_id, pause_s, num_attempts in ((1, 0, 1), (2, 0, 1), (3, 40, 1), (4, 40, 2), (5, 0, 2)):
            await trio.sleep(pause_s)
            prompt = [sequence_id, *PROMPT]
            first = await prefill.serve(sequence_id, prompt, ends_after_prefill=True)
            fields = {"output_token_ids": first.tokens, "is_resumed": True, "peer": prefill.peer}
            rest = await decode.serve(sequence_id, prompt, **fields)
            assert first.tokens + rest.tokens == continuation(prompt, 6)
            assert network.num_attempts == num_attempts
        await at_rest(prefill, decode)


async def test_ends_while_it_is_connected(autojump_clock: trio.testing.MockClock) -> None:
    """A fetch that is ended before it has a connection asks for nothing."""
    network = SlowNetwork()
    async with open_sides(2, network) as (prefill, decode):
        await decode.fetch(1, PROMPT, prefill.peer)
        await trio.sleep(1)
        await decode.engine.receive(EndFetch(1))
        await at_rest(prefill, decode)
        assert [type(message) for message in network.sent] == [Hello]


async def test_nobody_waits_for_what_is_not_computed(autojump_clock: trio.testing.MockClock) -> None:
    """A fetch of blocks that the peer does not compute ends once the sequence arrives, without delay."""
    async with open_sides(2, FaultyNetwork()) as (prefill, decode):
        await decode.fetch(1, PROMPT, prefill.peer)
        await trio.sleep(100)
        (first,) = continuation(PROMPT, 1)
        begun = trio.current_time()
        rest = await decode.serve(1, PROMPT, output_token_ids=[first], is_resumed=True, peer=prefill.peer)
        assert trio.current_time() - begun < 1
        assert [first, *rest.tokens] == continuation(PROMPT, 6)
        await at_rest(prefill, decode)


CALLS = {True: ["copy_from"], False: ["read_blocks", "write_blocks"]}


async def test_copies_that_fail(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, *, can_share: bool
) -> None:
    """A copy that raises, at either side, ends its transfer and nothing else."""
    num_calls = 0

    def failing(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise ValueError("injected fault: no such memory")

    for call in CALLS[can_share]:
        num_calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(FakeBackend, call, failing)
            for is_ahead in (True, False):
                await move_once(FaultyNetwork(), is_ahead=is_ahead)
        assert num_calls
