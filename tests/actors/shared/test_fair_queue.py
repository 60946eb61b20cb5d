"""The fair queue: tenants take turns, each is served in order, and none can fill the shared capacity."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.shared.fair_queue import FairQueue, QueueFull

KINDS = st.sampled_from(["put", "take", "done", "drop", "back"])
STEPS = st.lists(st.tuples(KINDS, st.sampled_from("abc")), max_size=60)


def test_tenants_take_turns() -> None:
    """A tenant with a hundred items waits for each other tenant once."""
    queue: FairQueue[str] = FairQueue(1000, 1000)
    for at in range(100):
        queue.put("many", f"many{at}", 1)
    queue.put("one", "one", 1)
    queue.put("two", "two", 1)
    assert [queue.take(100) for _ in range(4)] == ["many0", "one", "two", "many1"]


def test_active_items_per_tenant_are_limited() -> None:
    """A tenant at its limit is skipped until one of its items is done."""
    queue: FairQueue[int] = FairQueue(10, 10)
    for at in range(3):
        queue.put("a", at, 1)
    assert [queue.take(2) for _ in range(3)] == [0, 1, None]
    queue.put("b", 9, 1)
    assert queue.others_wait("a", 2) and not queue.others_wait("b", 2)
    assert queue.take(2) == 9
    queue.done("a")
    assert queue.take(2) == 2


def test_queue_is_bounded() -> None:
    """The queue is bounded in items and bytes. One tenant can fill half, which leaves room for the others."""
    queue: FairQueue[int] = FairQueue(8, 100)
    for at in range(4):
        queue.put("a", at, 1)
    with pytest.raises(QueueFull):
        queue.put("a", 4, 1)
    queue.put("b", 5, 40)
    with pytest.raises(QueueFull):
        queue.put("b", 6, 11)
    queue.put("c", 7, 50)
    with pytest.raises(QueueFull):
        queue.put("d", 8, 7)
    assert queue.num_waiting == 6 and queue.num_waiting_bytes == 94
    assert [queue.take(9) for _ in range(3)] == [0, 5, 7]
    queue.put("d", 8, 90)
    empty: FairQueue[int] = FairQueue(8, 100)
    empty.put("a", 1, 1000)
    with pytest.raises(QueueFull):
        empty.put("b", 2, 1)


@given(STEPS)
def test_order_and_counts(steps: list[tuple[str, str]]) -> None:
    """After any operations, each tenant's items are in order, the counts are right, and no tenant is left over."""
    queue: FairQueue[int] = FairQueue(20, 200)
    waiting: dict[str, list[int]] = defaultdict(list)
    active: dict[str, list[int]] = defaultdict(list)
    for number, (step, tenant) in enumerate(steps):
        match step:
            case "put":
                try:
                    queue.put(tenant, number, 3)
                    waiting[tenant].append(number)
                except QueueFull:
                    assert len(waiting[tenant]) >= 10 or sum(map(len, waiting.values())) >= 20
            case "take":
                ready = {who for who in "abc" if waiting[who] and len(active[who]) < 2}
                taken = queue.take(2)
                assert (taken is None) == (not ready)
                if taken is not None:
                    (who,) = (who for who in ready if waiting[who][0] == taken)
                    active[who].append(waiting[who].pop(0))
            case "done" if active[tenant]:
                active[tenant].pop()
                queue.done(tenant)
            case "drop" if waiting[tenant]:
                queue.drop(tenant, waiting[tenant].pop(len(waiting[tenant]) // 2))
            case "back" if active[tenant]:
                waiting[tenant].insert(0, active[tenant].pop(0))
                queue.put_back(tenant, waiting[tenant][0])
        assert queue.num_waiting == sum(map(len, waiting.values()))
        assert queue.num_waiting_bytes <= 3 * queue.num_waiting
    for tenant in "abc":
        for item in waiting[tenant]:
            queue.drop(tenant, item)
        for _ in active[tenant]:
            queue.done(tenant)
    assert queue.num_waiting == queue.num_waiting_bytes == 0 and queue.num_tenants == 0
