"""Lanes: short requests do not wait for long ones, tenants take turns, and nothing is kept after clients have left."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.shared.fair_queue import QueueFull
from quipu.actors.text_workers.lanes import Lane, Lanes, LaneSlot
from quipu.actors.tokenizer.prompt_sizes import SHORT_BYTES
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

ENCODER = Vocabulary(TINY).encoder
PATIENCE_S = 60.0


@attrs.define
class Gate:
    """Work that lasts until the test opens the gate."""

    opened: threading.Event = attrs.field(factory=threading.Event)
    started: list[str] = attrs.field(factory=list)

    def pass_through(self, name: str) -> None:
        self.started.append(name)
        assert self.opened.wait(PATIENCE_S)


@asynccontextmanager
async def gate() -> AsyncIterator[Gate]:
    """Yield a gate that is opened at the end, whatever happens."""
    it = Gate()
    try:
        with trio.fail_after(PATIENCE_S):
            yield it
    finally:
        it.opened.set()


async def work(slot: LaneSlot, gate: Gate, name: str) -> None:
    try:
        await slot.run(gate.pass_through, name)
    finally:
        slot.leave()


async def wait_begun(gate: Gate, count: int) -> list[str]:
    while len(gate.started) < count:
        await trio.sleep(0.001)
    return gate.started


async def test_resting_slots_hold_no_thread() -> None:
    """A request that waits for something else holds neither a thread nor a place; it queues again, or leaves."""
    lane = Lane(1, 1, 4, 1 << 20, ENCODER)
    async with gate() as it:
        first, second, third = (lane.enter(tenant, 1) for tenant in "abc")
        first.rest()
        third.rest()
        third.leave()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, second, it, "second")
            await wait_begun(it, 1)
            first.rest()
            nursery.start_soon(work, first, it, "first")
            await trio.testing.wait_all_tasks_blocked()
            assert lane.queue.num_waiting == 1 and lane.threads.statistics().tasks_waiting == 0
            it.opened.set()
        assert it.started == ["second", "first"] and lane.queue.num_tenants == 0
        again, last = lane.enter("a", 1), lane.enter("b", 1)
        again.rest()
        again.leave()
        await work(last, it, "last")
        assert lane.queue.num_tenants == 0


async def test_full_queue_after_a_rest() -> None:
    """A request that has rested is refused if the queue is full by then."""
    lane = Lane(1, 1, 4, 1 << 20, ENCODER)
    slot = lane.enter("a", 1)
    slot.rest()
    slots = [lane.enter("a", 1) for _ in range(3)]
    with pytest.raises(QueueFull):
        await slot.run(lambda: None)
    for one in (slot, *slots):
        one.leave()
    assert lane.queue.num_tenants == 0


async def test_short_requests_do_not_wait_for_long_ones() -> None:
    """However many long texts wait, a short one is served, even for the same tenant."""
    lanes = Lanes(100, 1 << 30, ENCODER)
    async with gate() as long, trio.open_nursery() as nursery:
        for at in range(20):
            nursery.start_soon(work, lanes.enter("a", SHORT_BYTES), long, f"long{at}")
        await wait_begun(long, 1)
        short = Gate()
        short.opened.set()
        await work(lanes.enter("a", SHORT_BYTES - 1), short, "short")
        assert short.started == ["short"]
        long.opened.set()


async def test_tenant_holds_at_most_half_of_the_threads() -> None:
    """Another tenant's long text is served at once, in the other half."""
    lane = Lane(4, 2, 100, 1 << 30, ENCODER)
    async with gate() as it, trio.open_nursery() as nursery:
        for at in range(5):
            nursery.start_soon(work, lane.enter("a", 1), it, f"a{at}")
        await wait_begun(it, 2)
        nursery.start_soon(work, lane.enter("b", 1), it, "b")
        await wait_begun(it, 3)
        assert sorted(it.started) == ["a0", "a1", "b"]
        it.opened.set()


async def test_tenants_alternate_between_texts() -> None:
    """Between two texts a request yields to other tenants, but not to later requests of its own."""
    lane = Lane(1, 1, 100, 1 << 30, ENCODER)
    served: list[str] = []

    async def serve(slot: LaneSlot, name: str, num_texts: int) -> None:
        for at in range(num_texts):
            await slot.run(served.append, f"{name}{at}")
            await slot.pause()
        slot.leave()

    first, second, other = lane.enter("a", 1), lane.enter("a", 1), lane.enter("b", 1)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for slot, name, num_texts in ((second, "second", 1), (first, "first", 3), (other, "other", 1)):
                nursery.start_soon(serve, slot, name, num_texts)
    assert served == ["first0", "other0", "first1", "first2", "second0"]


async def test_cancelled_request_is_not_served() -> None:
    """A request that is cancelled while waiting never runs; a running one keeps its thread until it ends."""
    lane = Lane(1, 1, 100, 1 << 30, ENCODER)
    async with gate() as it, trio.open_nursery() as nursery:
        scopes = [trio.CancelScope() for _ in range(3)]

        async def work_in(scope: trio.CancelScope, slot: LaneSlot, name: str) -> None:
            with scope:
                await work(slot, it, name)

        for at, scope in enumerate(scopes):
            nursery.start_soon(work_in, scope, lane.enter("a", 1), f"{at}")
        await wait_begun(it, 1)
        for scope in scopes[:2]:
            scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert it.started == ["0"] and lane.queue.num_waiting == 1
        it.opened.set()
        assert await wait_begun(it, 2) == ["0", "2"]
    assert lane.queue.num_waiting == lane.queue.num_tenants == 0


async def test_full_lane() -> None:
    """Each lane's queue has its own bound."""
    lanes = Lanes(4, 1 << 30, ENCODER)
    slots = [lanes.enter("a", SHORT_BYTES) for _ in range(lanes.long.max_per_tenant + 2)]
    with pytest.raises(QueueFull):
        lanes.enter("a", SHORT_BYTES)
    slots += [lanes.enter("b", SHORT_BYTES), lanes.enter("a", 1)]
    for slot in slots:
        slot.leave()
    assert lanes.long.queue.num_waiting == lanes.long.queue.num_tenants == 0
