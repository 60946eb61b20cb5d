"""Pins, one rule at a time, through the block manager's grants. Blocks are of 4 tokens; half of them may be pinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from quipu.actors.engine.block_manager.pins import Pins
from quipu.actors.engine.block_manager.pool_state import COMMITTED
from quipu.actors.engine.block_manager.pools import Pool, make_pool
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.prompts import Pin
from quipu.actors.messages.scheduler import Granted
from tests.actors.engine.block_manager.block_checks import check_manager, check_pins
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, pinned_of, reserve, reused_of

SIZE = 4
PROMPT = list(range(1, 19))
"""Four full blocks, and two tokens."""


def other(number: int, num_tokens: int = 18) -> list[int]:
    """Return a prompt that shares no prefix with any other."""
    return [100 * number + i for i in range(num_tokens)]


class Manager:
    """A block manager whose steps all succeed, unless a test says otherwise."""

    def __init__(self, num_usable: int = 16, **settings: Any) -> None:
        self.core = BlockManager(num_usable + 1, SIZE, **settings)
        self.now = 0.0
        self.step = 0
        self.next_id = 1

    def grant(self, **proposal: Any) -> Granted:
        self.step += 1
        granted = self.core.grant(reserve(self.step, SIZE, **proposal), self.now)
        check_manager(self.core)
        return granted

    def candidate(self, tokens: list[int], *pins: Pin) -> Candidate:
        self.next_id += 1
        return Candidate(self.next_id, tokens, len(tokens), "a", pins)

    def serve(self, tokens: list[int], *pins: Pin) -> Granted:
        """Run one prompt to its end. Returns the grant that commits and frees it."""
        candidate = self.candidate(tokens, *pins)
        self.grant(candidates=[candidate])
        return self.grant(committed=[self.step], free=[candidate.id])

    def found(self, tokens: list[int]) -> int:
        """Return how many blocks of a prompt can be found."""
        keys = keys_of("a", tokens, SIZE)
        return len(self.core.pool.match(keys, len(keys)))

    def fill(self, first: int = 1) -> None:
        """Let other prompts use every block that is available without releasing a pin."""
        for number in range(first, first + 20):
            num_blocks = min(4, self.core.pool.num_free)
            self.serve(other(number, SIZE * num_blocks))


@pytest.fixture
def manager() -> Manager:
    return Manager()


def test_pinned_prefix_is_not_evicted(manager: Manager) -> None:
    """Prompts that fill the cache do not evict it; what follows the mark is evicted, and so are unmarked prompts."""
    manager.serve(other(50))
    granted = manager.serve(PROMPT, Pin(3, 300))
    assert pinned_of(granted) == [(manager.next_id, 12)]
    assert granted.num_pinned_blocks == 3 and granted.num_free_blocks == 13
    manager.fill()
    assert manager.found(PROMPT) == 3
    assert manager.found(other(50)) == 0
    assert manager.core.pins.num_yielded == 0


@pytest.mark.parametrize("used_at", [None, 299.0])
def test_pin_expires_after_last_use(manager: Manager, used_at: float | None) -> None:
    """A hit restarts the time to live, even by an unmarked prompt that continues differently."""
    manager.serve(PROMPT, Pin(3, 300))
    if used_at is not None:
        manager.now = used_at
        candidate = manager.candidate(PROMPT[:12] + other(1))
        assert reused_of(manager.grant(candidates=[candidate])) == {candidate.id: 12}
        manager.grant(committed=[manager.step], free=[candidate.id])
    until = 300.0 if used_at is None else 599.0
    manager.now = until - 0.5
    assert manager.grant().num_pinned_blocks == 3
    manager.now = until
    granted = manager.grant()
    assert granted.num_pinned_blocks == 0 and granted.num_free_blocks == 16
    assert granted.num_pins_yielded == 0, "the pin must have expired, not yielded"
    manager.fill()
    assert manager.found(PROMPT) == 0


def test_partial_hit_does_not_refresh(manager: Manager) -> None:
    """A hit on two of the three pinned blocks does not refresh the pin."""
    manager.serve(PROMPT, Pin(3, 300))
    manager.now = 200.0
    manager.serve(PROMPT[:8] + other(1))
    manager.now = 300.0
    assert manager.grant().num_pinned_blocks == 0


def test_marking_again_keeps_the_longer_time(manager: Manager) -> None:
    """A pin for an hour that is marked again for five minutes still lasts an hour, also after later hits."""
    manager.serve(PROMPT, Pin(3, 3600))
    manager.now = 100.0
    granted = manager.serve(PROMPT, Pin(3, 300))
    assert pinned_of(granted) == [(manager.next_id, 12)]
    assert len(manager.core.pins) == 1 and granted.num_pinned_blocks == 3
    manager.now = 3699.0
    assert manager.grant().num_pinned_blocks == 3
    manager.now = 3700.0
    assert manager.grant().num_pinned_blocks == 0


def test_nested_marks_share_their_blocks(manager: Manager) -> None:
    """With an hour for two blocks and five minutes for four, two are left after five minutes; each counts once."""
    granted = manager.serve(PROMPT, Pin(2, 3600), Pin(4, 300))
    assert pinned_of(granted) == [(manager.next_id, 8), (manager.next_id, 16)]
    assert granted.num_pinned_blocks == 4
    manager.now = 300.0
    assert manager.grant().num_pinned_blocks == 2
    manager.fill()
    assert manager.found(PROMPT) == 2


def test_pinned_share_is_limited(manager: Manager) -> None:
    """Of sixteen blocks eight may be pinned: a prefix that would exceed this is not pinned, a shorter one that fits
    is."""
    manager.serve(PROMPT, Pin(4, 300))
    assert pinned_of(manager.serve(other(1), Pin(3, 300), Pin(4, 300))) == [
        (manager.next_id, 12),
        (manager.next_id, 16),
    ]
    granted = manager.serve(other(2), Pin(1, 300))
    assert pinned_of(granted) == [] and granted.num_pinned_blocks == 8
    tight = Manager(max_pinned_share=3 / 16)
    assert pinned_of(tight.serve(PROMPT, Pin(3, 300), Pin(4, 300))) == [(tight.next_id, 12)]


@pytest.mark.parametrize("settings", [{"max_pinned_share": 0.0}, {"enable_prefix_caching": False}])
def test_pins_disabled(settings: dict[str, Any]) -> None:
    """Without a share, or without caching, nothing is pinned."""
    manager = Manager(**settings)
    granted = manager.serve(PROMPT, Pin(4, 300))
    assert pinned_of(granted) == [] and granted.num_free_blocks == 16


def test_pins_yield_to_candidate_by_expiry(manager: Manager) -> None:
    """Only as many as needed yield; the pin that expires later stays, though it was made first."""
    manager.serve(PROMPT, Pin(4, 3600))
    manager.serve(other(1), Pin(4, 300))
    candidate = manager.candidate(other(2, 40))
    granted = manager.grant(candidates=[candidate])
    assert granted.admitted_ids == [candidate.id]
    assert granted.num_pins_yielded == 1 and granted.num_pinned_blocks == 4
    assert manager.found(PROMPT) == 4


def test_pins_do_not_yield_in_vain(manager: Manager) -> None:
    """If a candidate would not fit even without them, it waits and the pins stay."""
    manager.serve(PROMPT, Pin(4, 300))
    running = manager.candidate(other(1, 40))
    manager.grant(candidates=[running])
    granted = manager.grant(candidates=[manager.candidate(other(2, 32))])
    assert granted.admitted_ids == [] and granted.num_pins_yielded == 0 and granted.num_pinned_blocks == 4


def test_pin_that_candidate_hits_does_not_yield(manager: Manager) -> None:
    """A candidate that hits the pinned prefix and needs the rest of the pool gains nothing from the pin."""
    manager.serve(PROMPT, Pin(4, 300))
    candidate = manager.candidate(PROMPT[:16] + other(1, 48))
    granted = manager.grant(candidates=[candidate])
    assert reused_of(granted) == {candidate.id: 16} and granted.num_pins_yielded == 0
    assert granted.num_free_blocks == granted.num_pinned_blocks == 0


def test_pins_yield_before_preemption(manager: Manager) -> None:
    """A row that needs a block gets it from a pin; sequences are preempted only when there is none."""
    manager.serve(PROMPT, Pin(4, 300))
    first, second = manager.candidate(other(1, 24)), manager.candidate(other(2, 24))
    manager.grant(candidates=[first, second])
    granted = manager.grant(rows=[(first.id, 24, 1)], victims=[second.id, first.id])
    assert granted.preempted_ids == [] and granted.num_pins_yielded == 1
    assert granted.num_free_blocks == 3
    granted = manager.grant(rows=[(first.id, 25, 16)], victims=[second.id, first.id])
    assert granted.preempted_ids == [second.id]


def test_pin_that_frees_nothing_stays(manager: Manager) -> None:
    """The pin that expires first is held by a running sequence, so another one yields."""
    manager.serve(other(1), Pin(4, 3600))
    manager.serve(PROMPT, Pin(4, 300))
    holder = manager.candidate(PROMPT[:16] + other(2, 24))
    manager.core.grant(reserve(90, SIZE, candidates=[holder]), -200.0)  # a hit that does not make it expire later
    granted = manager.grant(rows=[(holder.id, 40, 12)], victims=[holder.id])
    assert granted.preempted_ids == [] and granted.num_pins_yielded == 1
    assert manager.found(PROMPT) == 4 and manager.core.pins.blocks() == [manager.core.allocations[holder.id].table[:4]]


def test_overlapping_pins_yield_together(manager: Manager) -> None:
    """The shorter one expires first but frees nothing while the longer one exists: both yield if both must."""
    manager.serve(PROMPT, Pin(4, 300))
    manager.now = -100.0
    manager.serve(PROMPT[:8] + other(1, 2), Pin(2, 300))
    candidate = manager.candidate(other(2, 64))
    granted = manager.grant(candidates=[candidate])
    assert granted.admitted_ids == [candidate.id] and granted.num_pins_yielded == 2


def test_failed_step_pins_nothing(manager: Manager) -> None:
    """Neither a failed step nor a dropped one pins anything; the dropped row pins its prefix when it runs again."""
    candidate = manager.candidate(PROMPT, Pin(2, 300), Pin(4, 300))
    manager.grant(candidates=[candidate], chunk=8)
    manager.grant(rows=[(candidate.id, 8, 10)])
    granted = manager.grant(failed=[2], committed=[1])
    assert pinned_of(granted) == [(candidate.id, 8)]
    manager.grant(rows=[(candidate.id, 8, 10)])
    granted = manager.grant(committed=[4])
    assert pinned_of(granted) == [(candidate.id, 16)]
    failing = manager.candidate(other(1), Pin(4, 300))
    manager.grant(candidates=[failing])
    granted = manager.grant(failed=[manager.step], free=[failing.id])
    assert pinned_of(granted) == [] and granted.num_pinned_blocks == 0, "the pinned blocks are held by a sequence"


def test_blocks_being_rewritten_are_not_pinned(manager: Manager) -> None:
    """The blocks were evicted before their step was committed, and the step that writes them again may still fail."""
    first = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[first])
    taker = manager.candidate(other(1, 64))
    manager.grant(free=[first.id], candidates=[taker])
    again = manager.candidate(PROMPT)
    manager.grant(free=[taker.id], candidates=[again])
    assert manager.found(PROMPT) == 4
    assert pinned_of(manager.grant(committed=[1])) == []
    assert manager.grant(failed=[3], free=[again.id]).num_free_blocks == 16


def test_prefix_with_evicted_block_is_not_pinned(manager: Manager) -> None:
    """Its sequence ended, and one of its blocks was evicted before its step was committed."""
    first = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[first])
    taker = manager.candidate(other(1, 56))
    manager.grant(free=[first.id], candidates=[taker])
    assert 0 < manager.found(PROMPT) < 4
    assert pinned_of(manager.grant(committed=[1])) == []


def test_pin_outlives_aborted_sequence(manager: Manager) -> None:
    """If a client leaves while its step runs, what was computed is still pinned."""
    candidate = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[candidate])
    manager.grant(free=[candidate.id])
    granted = manager.grant(committed=[1])
    assert pinned_of(granted) == [(candidate.id, 16)] and granted.num_pinned_blocks == 4


def test_reset_removes_all_pins(manager: Manager) -> None:
    """Sequences from before the reset pin nothing either."""
    manager.serve(PROMPT, Pin(4, 300))
    candidate = manager.candidate(other(1), Pin(4, 300))
    manager.grant(candidates=[candidate])
    granted = manager.grant(reset=True, committed=[manager.step], free=[candidate.id])
    assert pinned_of(granted) == []
    assert granted.num_pinned_blocks == granted.num_cached_blocks == 0 and granted.num_free_blocks == 16
    assert manager.found(PROMPT) == 0


class CountingPool:
    """A pool that counts the blocks passed to the calls that pins make."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = make_pool(num_blocks)
        self.num_looked_at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        self.num_looked_at += min(limit, len(keys))
        return self._pool.match(keys, limit)

    def is_freed_by(self, blocks: list[int]) -> bool:
        self.num_looked_at += len(blocks)
        return self._pool.is_freed_by(blocks)

    def unpin(self, blocks: list[int]) -> None:
        self.num_looked_at += len(blocks)
        self._pool.unpin(blocks)


def middles_first(numbers: list[int]) -> list[int]:
    middle = len(numbers) // 2
    return [numbers[middle], *middles_first(numbers[:middle]), *middles_first(numbers[middle + 1 :])] if numbers else []


@pytest.mark.parametrize("order", ["shortest", "longest", "longest, then shortest", "middle"])
def test_pinning_every_prefix_costs_about_one_lookup_a_block(order: str) -> None:
    """Nested pins are made without looking again at blocks that others cover, and store each block once. They give way
    longest first, and none looks at the blocks of the others."""
    num_blocks = 200
    ends = list(range(1, num_blocks + 1))
    if order == "middle":
        ends = middles_first(ends)
    elif order != "shortest":
        ends = ends[::-1] if order == "longest" else [ends[-1], *ends[:-1]]
    pool = CountingPool(num_blocks + 1)
    keys = [index.to_bytes(32, "big") for index in range(num_blocks)]
    blocks = pool.take(num_blocks)
    pool.publish(blocks, keys, COMMITTED)
    pool.release(blocks)
    pins = Pins(cast("Pool", pool), SIZE, num_blocks)
    for num_pinned in ends:
        pins.mark(num_pinned, keys, (Pin(num_pinned, 300),))
        pins.plan(1, [num_pinned], [0], [num_pinned * SIZE])
        pins.commit([1], 0.0)
    assert len(pins) == num_blocks and sum(map(len, pins.blocks())) == num_blocks
    assert pool.num_looked_at <= num_blocks * 12, "more than a binary search for each pin"
    check_pins(pins)
    pool.num_looked_at = 0
    pins.give_way(num_blocks // 2)
    assert sorted(len(pin.blocks) for pin in pins.prefixes()) == list(range(1, num_blocks // 2 + 1))
    pins.give_way(num_blocks)
    assert not pins.blocks() and pool.num_free == num_blocks
    assert pool.num_looked_at <= 3 * num_blocks
