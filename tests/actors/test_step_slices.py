"""A step that concerns many requests lets other tasks run between its accounts, its tokens and its messages to the
engine."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.accountant import actor as accountant
from quipu.actors.accountant.effects import SideEffects
from quipu.actors.detokenizer import actor as detokenizer
from quipu.actors.detokenizer.delivery import Delivery
from quipu.actors.fleet.frames import MAX_WRITE_BYTES, PART_IDS, FrameReader, FrameWriter, WireMessage
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.detokenizer import Tokens
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from tests.runtimes import BLOCK, Client, small_runtime

NUM_REQUESTS = 12


def zero_length_slices() -> Any:
    """Return a clock on which every time slice is over immediately."""
    return SimpleNamespace(perf_counter=count(1.0).__next__, time=lambda: 0.0)


async def ask_concurrently(client: Client) -> None:
    async with trio.open_nursery() as nursery:
        for index in range(NUM_REQUESTS):
            prompt = [300 + index] * (BLOCK // 2)
            nursery.start_soon(lambda prompt=prompt: client.ask(prompt, max_tokens=3))


def are_spread(rounds: list[int]) -> bool:
    """Return whether calls were spread over many scheduler rounds; the order within a round is random."""
    return len(set(rounds)) > len(rounds) // 3


class Rounds:
    """Counts the rounds of the scheduler."""

    number = 0

    async def run(self) -> None:
        while True:
            self.number += 1
            await trio.lowlevel.checkpoint()


async def test_tasks_run_between_accounts(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accounts of one report are handled one by one if each takes its time."""
    rounds, settled = Rounds(), []
    settle = SideEffects.apply_due

    def recording(self: SideEffects, request: Any, now: float) -> None:
        settled.append(rounds.number)
        settle(self, request, now)

    monkeypatch.setattr(SideEffects, "apply_due", recording)
    monkeypatch.setattr(accountant, "time", zero_length_slices())
    async with small_runtime() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_concurrently, client)
            await trio.sleep(0.005)  # a step is in flight
            nursery.start_soon(rounds.run)
            await rounds_until(lambda: len(settled) >= 3 * NUM_REQUESTS)
            nursery.cancel_scope.cancel()
    assert are_spread(settled)


async def test_tasks_run_between_tokens(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one step are passed on one by one, in order, if each takes its time."""
    rounds, given, sent = Rounds(), [], list[int]()
    give, decode_slice = Delivery.give, detokenizer.Detokenizer._decode_slice
    begun = list[Tokens]()

    def listening(self: Any, pending: Any, tokens: Tokens) -> bool:
        if not any(tokens is other for other in begun):
            begun.append(tokens)
            sent.extend(tokens.sequence_ids)
        return decode_slice(self, pending, tokens)

    def recording(self: Any, sequence: Any, *args: Any) -> None:
        given.append((rounds.number, sequence.sequence_id))
        give(self, sequence, *args)

    monkeypatch.setattr(Delivery, "give", recording)
    monkeypatch.setattr(detokenizer.Detokenizer, "_decode_slice", listening)
    monkeypatch.setattr(detokenizer, "time", zero_length_slices())
    async with small_runtime() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_concurrently, client)
            await trio.sleep(0.005)
            nursery.start_soon(rounds.run)
            await rounds_until(lambda: len(given) >= 3 * NUM_REQUESTS)
            nursery.cancel_scope.cancel()
    assert are_spread([number for number, _ in given])
    assert [sequence_id for _, sequence_id in given] == sent[: len(given)]


async def rounds_until(condition: Any) -> None:
    """Let the mock clock advance while rounds are counted."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    for _ in range(100_000):
        if condition():
            return
        clock.jump(0.0001)
        await trio.lowlevel.checkpoint()
    raise AssertionError("the condition was never met")


async def test_long_prompts_are_written_in_parts() -> None:
    """However many prompts are queued for the engine, and however long, the bytes encoded between two checkpoints are
    bounded, and so are those that are decoded; choices share their prompt at the other end, too.
    """
    messages: list[WireMessage] = [
        Submit(number, list(range(20_000)), b"", [], SamplingParams(max_tokens=1)) for number in range(40)
    ]
    ours, theirs = trio.testing.memory_stream_one_way_pair()
    writes: list[int] = []

    class RecordingStream(trio.abc.SendStream):
        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            writes.append(len(data))
            await ours.send_all(data)

        async def wait_send_all_might_not_block(self) -> None:
            await ours.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await ours.aclose()

    sampling = SamplingParams(max_tokens=1)
    messages.append(LookUp(1, list(range(1_000_000)), b"", [b"k" * 32], True))
    messages.append(Submit(99, list(range(1_000_000)), b"", [b"k" * 32], sampling, group_id=99, num_to_come=1))
    messages.append(attrs.evolve(messages[-1], sequence_id=100, num_to_come=0))

    class RecordingReader(FrameReader):
        def _decode(self, number: int, body: memoryview) -> WireMessage | None:
            decoded.append(len(body))
            return super()._decode(number, body)

    decoded: list[int] = []
    writer, reader = FrameWriter(RecordingStream(), 1), RecordingReader(theirs, 1)
    await writer.send_all(messages)
    longest = 5 * PART_IDS + 1000
    assert len(writes) > 1 and max(writes) <= MAX_WRITE_BYTES + longest
    received: list[WireMessage] = []
    while len(received) < len(messages):
        received += await reader.receive_all()
    assert received == messages and max(decoded) <= longest
    first, second = received[-2:]
    assert isinstance(first, Submit) and isinstance(second, Submit)
    assert first.prompt_token_ids is second.prompt_token_ids
