"""Clients that leave: at every hop, at every checkpoint, in both orders of Submit and Abort.

Afterwards nothing is left: no account, block, tracked sequence or task; the record has the outcome `cancelled` and the
work done.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, Delta, Started
from quipu.actors.messages.outcomes import Outcome
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.runtimes import kill_engine, num_passes, small_runtime, text_of, value_of
from tests.traps.wire import samples, settle

PROMPT = random.Random(1).choices(range(300, 4000), k=40)


async def test_before_start(autojump_clock: trio.abc.Clock) -> None:
    """A request that leaves before the tokenizer has received it has unknown cached tokens, not 0."""
    async with small_runtime() as client:
        ticket = client.open(PROMPT)
        ticket.leave()
        await settle(client)
        closed = ticket.mailbox.closed
    assert closed is not None
    assert closed.record.outcome is Outcome.CANCELLED
    assert closed.record.cached_tokens is None
    assert closed.record.prompt_tokens is None


async def test_abort_before_submit(autojump_clock: trio.abc.Clock) -> None:
    """A request that leaves while its Submit waits for a slot is never submitted."""
    async with small_runtime(submit_slots=1) as client:
        desk = client.runtime.desk
        await desk.sequences.slots.acquire()  # the queue is full
        ticket = client.open(PROMPT)
        await ticket.start()
        await trio.testing.wait_all_tasks_blocked()
        ticket.leave()
        assert not client.runtime.route_store.prompts, "nothing was submitted, so nothing must be aborted"
        desk.sequences.slots.release()
        await settle(client)
        assert ticket.mailbox.closed is not None
        assert ticket.mailbox.closed.record.outcome is Outcome.CANCELLED
        assert num_passes(client.engine.executor) == 0
        assert (await client.ask(PROMPT)).record.cached_tokens == 0


async def test_submit_then_abort_before_the_engine_reads(autojump_clock: trio.abc.Clock) -> None:
    """The router ends what no engine has been given; the next engine hears nothing of it."""
    async with small_runtime(restart_backoff_s=5.0, on_engine_death="fail") as client:
        kill_engine(client)
        await client.ask(PROMPT)
        assert not client.runtime.desk.health().is_ready, "no engine takes anything now"
        ticket = client.open(PROMPT)
        await ticket.start()
        await trio.testing.wait_all_tasks_blocked()
        assert len(client.runtime.route_store.unrouted) == 1
        ticket.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert not client.runtime.route_store.unrouted
        assert client.runtime.entry_store.num_open_accounts == 0
        await trio.sleep(10)
        assert num_passes(client.engine.executor) == 0
        await settle(client)
        assert ticket.mailbox.closed is not None
        assert ticket.mailbox.closed.record.outcome is Outcome.CANCELLED
        assert ticket.mailbox.closed.record.completion_tokens == 0


@pytest.mark.parametrize("moment", ["started", "first token", "between tokens", "after the last"])
async def test_leaving_at_a_later_hop(autojump_clock: trio.abc.Clock, moment: str) -> None:
    """The account closes with the work done; blocks are returned within one step."""
    async with small_runtime(max_num_batched_tokens=16) as client:
        ticket = client.open(PROMPT, max_tokens=6)
        await ticket.start()
        num_tokens = 0
        here = False
        while not here:
            for event in await ticket.mailbox.get():
                num_tokens += event.num_tokens if isinstance(event, Delta) else 0
                here |= {
                    "started": isinstance(event, Started),
                    "first token": num_tokens == 1,
                    "between tokens": num_tokens == 3,
                    "after the last": isinstance(event, Closed),
                }[moment]
        ticket.leave()
        left_at = trio.current_time()
        await settle(client)
        assert trio.current_time() - left_at <= 3 * 0.01 + 1e-6, "two steps may be in flight"
        closed = ticket.mailbox.closed
    assert closed is not None
    finished = moment == "after the last"
    assert closed.record.outcome is (Outcome.FINISHED if finished else Outcome.CANCELLED)
    assert closed.record.cached_tokens == 0
    assert closed.record.prompt_tokens == 40
    assert closed.record.completion_tokens == num_tokens
    assert not closed.record.disputed


async def test_leaving_in_the_queue(autojump_clock: trio.abc.Clock) -> None:
    """A request that leaves while queued has unknown cached tokens and does not block the queue."""
    async with small_runtime(max_num_seqs=1) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, PROMPT)
        await trio.sleep(0.005)
        waiting, behind = client.open(PROMPT), client.open(PROMPT)
        await waiting.start()
        await behind.start()
        await trio.sleep(0.02)
        waiting.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert waiting.mailbox.closed is not None, "no step held it: closed at once"
        assert waiting.mailbox.closed.record.outcome is Outcome.CANCELLED
        assert waiting.mailbox.closed.record.cached_tokens is None
        await trio.sleep(1)
        assert behind.mailbox.closed is not None
        assert behind.mailbox.closed.record.outcome is Outcome.FINISHED
        behind.leave()
        await settle(client)


async def test_leaving_after_a_stop_string(autojump_clock: trio.abc.Clock) -> None:
    """A client that leaves once its stop string was found had a finished request."""
    dials = Dials(step_seconds=0.01, first_token_id=35, num_token_ids=60)
    whole = text_of(continuation(PROMPT, 30, dials))
    async with small_runtime(dials) as client:
        ticket = client.open(PROMPT, max_tokens=30, stop=(whole[5:7],))
        await ticket.start()
        while True:
            events = await ticket.mailbox.get()
            if any(isinstance(event, Delta) and event.finish_reason for event in events):
                break
        ticket.leave()
        await settle(client)
        assert ticket.mailbox.closed is not None
        assert ticket.mailbox.closed.record.outcome is Outcome.FINISHED
        assert ticket.mailbox.closed.record.completion_tokens == 7


async def test_leaving_twice(autojump_clock: trio.abc.Clock) -> None:
    """Leaving is idempotent, in any state."""
    async with small_runtime() as client:
        ticket = client.open(PROMPT)
        ticket.leave()
        ticket.leave()
        await settle(client)
        assert samples(client)['requests_total{outcome="cancelled"}'] == 1


class CancelAt(trio.abc.Instrument):
    """Calls `act` before the k-th time that any task runs, counted from `arm`."""

    def __init__(self) -> None:
        self.count = 0
        self.at: int | None = None
        self.act: Callable[[], object] = lambda: None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()


@pytest.mark.parametrize(
    ("num_choices", "stop"), [(1, False), (2, False), (1, True)], ids=["one", "two choices", "stop string"]
)
async def test_every_checkpoint(autojump_clock: trio.abc.Clock, num_choices: int, stop: bool) -> None:
    """A request cancelled before the k-th task step of the whole system leaves nothing, for every k until
    it completes."""
    dials = Dials(step_seconds=0.01, first_token_id=35, num_token_ids=60)
    whole = text_of(continuation(PROMPT, 6, dials))
    instrument = CancelAt()
    trio.lowlevel.add_instrument(instrument)
    outcomes = set()
    async with small_runtime(dials, max_num_batched_tokens=32) as client:
        for k in range(1, 2000):
            with trio.CancelScope() as scope:
                instrument.count, instrument.at, instrument.act = 0, k, scope.cancel
                await client.ask(PROMPT, n=num_choices, max_tokens=6, stop=(whole[3:5],) if stop else ())
            instrument.at = None
            await settle(client)
            if not scope.cancelled_caught:
                break
        for outcome in ("finished", "cancelled"):
            if samples(client).get(f'requests_total{{outcome="{outcome}"}}'):
                outcomes.add(outcome)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    trio.lowlevel.remove_instrument(instrument)
    assert 20 < k < 1999, "the sweep must cover a whole request"
    assert outcomes == {"finished", "cancelled"}


async def test_many_at_random_moments(autojump_clock: trio.abc.Clock) -> None:
    """Two hundred clients that share prefixes and leave at random leave nothing; the others are served correctly."""
    chance = random.Random(3)
    answered = 0
    async with small_runtime(num_blocks=40, max_model_len=300, watermark=0.0) as client:
        await trio.testing.wait_all_tasks_blocked()
        num_tasks = trio.lowlevel.current_statistics().tasks_living

        async def run_client(index: int) -> None:
            nonlocal answered
            await trio.sleep(chance.random() * 3)
            prompt = [*PROMPT[: chance.randrange(1, 40)], 300 + index]
            with trio.move_on_after(chance.choice((0, 0.001, 0.02, 0.1, 0.3, 100))) as scope:
                answer = await client.ask(prompt, max_tokens=12)
                assert answer.texts[0] == text_of(continuation(prompt, 12))
                answered += 1
            assert answered or scope.cancelled_caught

        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(run_client, index)
        await settle(client)
        assert trio.lowlevel.current_statistics().tasks_living == num_tasks
        assert value_of(client.runtime.metrics.usage_disputed) == 0
        counters = samples(client)
        ends = {outcome: counters.get(f'requests_total{{outcome="{outcome}"}}', 0) for outcome in Outcome}
        assert ends[Outcome.FINISHED] >= answered and sum(ends.values()) == 200
        assert ends[Outcome.FAILED] == ends[Outcome.REJECTED] == 0
    assert 20 < answered < 200
