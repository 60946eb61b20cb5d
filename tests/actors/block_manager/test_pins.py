"""Pins, one rule at a time, through the block manager's walk. Blocks are of 4 tokens; half of them may be pinned."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.block_manager.reservation import BlockManager
from quipu.actors.messages.prompts import Breakpoint, CacheTtl, Pin
from quipu.actors.messages.scheduler import Granted
from quipu.actors.shared.breakpoints import in_whole_blocks, pins_of
from tests.actors.block_manager.proposals import Candidate, keys_of, pinned_of, reserve, reused_of

SIZE = 4
SHORT, LONG = CacheTtl.FIVE_MINUTES, CacheTtl.ONE_HOUR
PROMPT = list(range(1, 19))
"""Four full blocks, and two tokens."""


def other(number: int, num_tokens: int = 18) -> list[int]:
    """A prompt that begins like no other."""
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
        self.core.check()
        return granted

    def candidate(self, tokens: list[int], *pins: Pin) -> Candidate:
        self.next_id += 1
        return Candidate(self.next_id, tokens, len(tokens), "a", pins)

    def serve(self, tokens: list[int], *pins: Pin) -> Granted:
        """One prompt, to its end; what its commit and end came to."""
        candidate = self.candidate(tokens, *pins)
        self.grant(candidates=[candidate])
        return self.grant(committed=[self.step], free=[candidate.id])

    def found(self, tokens: list[int]) -> int:
        """How many blocks of a prompt can be found."""
        keys = keys_of("a", tokens, SIZE)
        return len(self.core.pool.match(keys, len(keys)))

    def fill(self, first: int = 1) -> None:
        """Other prompts use every block that is to be had without letting a pin go."""
        for number in range(first, first + 20):
            num_blocks = min(4, self.core.pool.num_free)
            self.serve(other(number, SIZE * num_blocks))


@pytest.fixture
def manager() -> Manager:
    return Manager()


def test_a_pinned_prefix_is_not_reused_for_others(manager: Manager) -> None:
    """Prompts that fill the cache leave it; what comes after the mark goes, as does a prompt that nobody marked."""
    manager.serve(other(50))
    granted = manager.serve(PROMPT, Pin(3, 300))
    assert pinned_of(granted) == [(manager.next_id, 12)]
    assert granted.num_pinned_blocks == 3 and granted.num_free_blocks == 13
    manager.fill()
    assert manager.found(PROMPT) == 3
    assert manager.found(other(50)) == 0
    assert manager.core.pins.num_yielded == 0


@pytest.mark.parametrize("used_at", [None, 299.0])
def test_it_expires_after_its_last_use(manager: Manager, used_at: float | None) -> None:
    """A hit begins the time anew, also one of a prompt that is marked nowhere and goes on differently."""
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
    assert granted.num_pins_yielded == 0, "its time was over: it has not yielded"
    manager.fill()
    assert manager.found(PROMPT) == 0


def test_a_hit_that_ends_before_it_is_no_use_of_it(manager: Manager) -> None:
    """Two of its three blocks are read: the third is not worth more for that."""
    manager.serve(PROMPT, Pin(3, 300))
    manager.now = 200.0
    manager.serve(PROMPT[:8] + other(1))
    manager.now = 300.0
    assert manager.grant().num_pinned_blocks == 0


def test_marked_again_it_is_one_owner_with_the_longer_time(manager: Manager) -> None:
    """For an hour, then for five minutes: an hour it is, also from a later hit on."""
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
    """An hour for two blocks, five minutes for four: after five minutes two are left, each time counted once."""
    granted = manager.serve(PROMPT, Pin(2, 3600), Pin(4, 300))
    assert pinned_of(granted) == [(manager.next_id, 8), (manager.next_id, 16)]
    assert granted.num_pinned_blocks == 4
    manager.now = 300.0
    assert manager.grant().num_pinned_blocks == 2
    manager.fill()
    assert manager.found(PROMPT) == 2


def test_no_more_than_the_share(manager: Manager) -> None:
    """Eight blocks of sixteen: a prefix that would make it more is not pinned, a shorter one that fits is."""
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
def test_off(settings: dict[str, Any]) -> None:
    """No share, or no cache: nothing is pinned."""
    manager = Manager(**settings)
    granted = manager.serve(PROMPT, Pin(4, 300))
    assert pinned_of(granted) == [] and granted.num_free_blocks == 16


def test_pins_yield_to_a_candidate_soonest_expiry_first(manager: Manager) -> None:
    """As many as it needs: who expires later stays, though it was pinned before."""
    manager.serve(PROMPT, Pin(4, 3600))
    manager.serve(other(1), Pin(4, 300))
    candidate = manager.candidate(other(2, 40))
    granted = manager.grant(candidates=[candidate])
    assert granted.admitted_ids == [candidate.id]
    assert granted.num_pins_yielded == 1 and granted.num_pinned_blocks == 4
    assert manager.found(PROMPT) == 4


def test_pins_do_not_yield_in_vain(manager: Manager) -> None:
    """A candidate that would not fit without them either waits, and they stay."""
    manager.serve(PROMPT, Pin(4, 300))
    running = manager.candidate(other(1, 40))
    manager.grant(candidates=[running])
    granted = manager.grant(candidates=[manager.candidate(other(2, 32))])
    assert granted.admitted_ids == [] and granted.num_pins_yielded == 0 and granted.num_pinned_blocks == 4


def test_what_a_candidate_finds_does_not_count_as_free(manager: Manager) -> None:
    """It reads the pinned prefix and needs all the rest of the pool: the pin has nothing to give, and stays."""
    manager.serve(PROMPT, Pin(4, 300))
    candidate = manager.candidate(PROMPT[:16] + other(1, 48))
    granted = manager.grant(candidates=[candidate])
    assert reused_of(granted) == {candidate.id: 16} and granted.num_pins_yielded == 0
    assert granted.num_free_blocks == granted.num_pinned_blocks == 0


def test_pins_yield_before_anybody_is_preempted(manager: Manager) -> None:
    """A row that needs a block gets it from a pin; only when there is none does somebody lose his."""
    manager.serve(PROMPT, Pin(4, 300))
    first, second = manager.candidate(other(1, 24)), manager.candidate(other(2, 24))
    manager.grant(candidates=[first, second])
    granted = manager.grant(rows=[(first.id, 24, 1)], victims=[second.id, first.id])
    assert granted.preempted_ids == [] and granted.num_pins_yielded == 1
    assert granted.num_free_blocks == 3
    granted = manager.grant(rows=[(first.id, 25, 16)], victims=[second.id, first.id])
    assert granted.preempted_ids == [second.id]


def test_one_that_frees_nothing_stays(manager: Manager) -> None:
    """The pin that expires first is held by a running sequence: another one yields."""
    manager.serve(other(1), Pin(4, 3600))
    manager.serve(PROMPT, Pin(4, 300))
    holder = manager.candidate(PROMPT[:16] + other(2, 24))
    manager.core.grant(reserve(90, SIZE, candidates=[holder]), -200.0)  # a hit that does not make it the later one
    granted = manager.grant(rows=[(holder.id, 40, 12)], victims=[holder.id])
    assert granted.preempted_ids == [] and granted.num_pins_yielded == 1
    assert manager.found(PROMPT) == 4 and manager.core.pins.blocks() == [manager.core.allocations[holder.id].table[:4]]


def test_what_two_pins_keep_only_together(manager: Manager) -> None:
    """The shorter one expires first and frees nothing while the longer one is there: both yield where both must."""
    manager.serve(PROMPT, Pin(4, 300))
    manager.now = -100.0
    manager.serve(PROMPT[:8] + other(1, 2), Pin(2, 300))
    candidate = manager.candidate(other(2, 64))
    granted = manager.grant(candidates=[candidate])
    assert granted.admitted_ids == [candidate.id] and granted.num_pins_yielded == 2


def test_a_failed_step_pins_nothing(manager: Manager) -> None:
    """Nor does one that was dropped: its row runs again, and then it does."""
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
    assert pinned_of(granted) == [] and granted.num_pinned_blocks == 0, "the first one is held"


def test_blocks_that_are_being_written_again_are_not_pinned(manager: Manager) -> None:
    """They were lost before their step was heard of, and somebody else's step may yet fail."""
    first = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[first])
    taker = manager.candidate(other(1, 64))
    manager.grant(free=[first.id], candidates=[taker])
    again = manager.candidate(PROMPT)
    manager.grant(free=[taker.id], candidates=[again])
    assert manager.found(PROMPT) == 4
    assert pinned_of(manager.grant(committed=[1])) == []
    assert manager.grant(failed=[3], free=[again.id]).num_free_blocks == 16


def test_a_prefix_with_a_hole_is_not_pinned(manager: Manager) -> None:
    """Its sequence left and a block of it was taken before its step was heard of."""
    first = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[first])
    taker = manager.candidate(other(1, 56))
    manager.grant(free=[first.id], candidates=[taker])
    assert 0 < manager.found(PROMPT) < 4
    assert pinned_of(manager.grant(committed=[1])) == []


def test_who_leaves_leaves_its_pin(manager: Manager) -> None:
    """A client that goes while its step runs: what was computed is kept, as it asked."""
    candidate = manager.candidate(PROMPT, Pin(4, 300))
    manager.grant(candidates=[candidate])
    manager.grant(free=[candidate.id])
    granted = manager.grant(committed=[1])
    assert pinned_of(granted) == [(candidate.id, 16)] and granted.num_pinned_blocks == 4


def test_a_reset_lets_all_go(manager: Manager) -> None:
    """Also of what is on its way: a sequence from before the reset pins nothing."""
    manager.serve(PROMPT, Pin(4, 300))
    candidate = manager.candidate(other(1), Pin(4, 300))
    manager.grant(candidates=[candidate])
    granted = manager.grant(reset=True, committed=[manager.step], free=[candidate.id])
    assert pinned_of(granted) == []
    assert granted.num_pinned_blocks == granted.num_cached_blocks == 0 and granted.num_free_blocks == 16
    assert manager.found(PROMPT) == 0


def test_marks_in_whole_blocks() -> None:
    """What a breakpoint keeps ends with its last full block; two that end there are one, for the longer time."""
    breakpoints = (Breakpoint(3, LONG), Breakpoint(9, SHORT), Breakpoint(11, LONG), Breakpoint(16, SHORT))
    assert pins_of(breakpoints, SIZE) == (Pin(2, 3600), Pin(4, 300))
    whole = in_whole_blocks(breakpoints, SIZE)
    assert [(b.position, b.ttl) for b in whole] == [(0, LONG), (8, SHORT), (8, LONG), (16, SHORT)]
