"""Who waits for a prefix that another computes: one case of the rule at a time. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.block_manager.pending import MAX_DELAY_STEPS, _num_shared
from quipu.actors.block_manager.reservation import BlockManager
from quipu.actors.messages.scheduler import Granted
from tests.actors.block_manager.proposals import Candidate, keys_of, reserve

SIZE = 4
SHARED = list(range(100, 132))
LIMIT = 1 << 30


def manager_of(overhead: int = 0, num_usable: int = 200) -> BlockManager:
    return BlockManager(num_usable + 1, SIZE, share_pending_prefixes=True, step_overhead_tokens=overhead)


def like(sequence_id: int, num_shared: int, num_own: int) -> Candidate:
    """A prompt that begins as all do, and goes on in its own way."""
    tokens = SHARED[:num_shared] + [sequence_id] * num_own
    return Candidate(sequence_id, tokens, len(tokens))


def admitted(
    manager: BlockManager, *candidates: Candidate, step: int = 1, budget: int = 1000, chunk: int = LIMIT
) -> Granted:
    proposal = reserve(step, SIZE, candidates=candidates, budget=budget, chunk=chunk)
    granted = manager.grant(proposal)
    manager.check()
    return granted


def test_it_waits_where_the_shared_blocks_cost_more_than_a_step() -> None:
    """Three followers save 24 tokens, 8 each, and are served by the next step, from the cache."""
    manager = manager_of(overhead=24)
    prompts = [like(i, 8, 4) for i in range(1, 5)]
    assert admitted(manager, *prompts).admitted_ids == [1]
    then = admitted(manager, *prompts[1:], step=2)
    assert (then.admitted_ids, then.admitted_reused) == ([2, 3, 4], [8, 8, 8])


def test_it_computes_where_they_cost_less() -> None:
    """One token short of what a step costs nobody waits: all are served at once."""
    assert admitted(manager_of(overhead=25), *[like(i, 8, 4) for i in range(1, 5)]).admitted_ids == [1, 2, 3, 4]


def test_what_is_saved_is_at_most_what_the_budget_would_have_let_be_computed() -> None:
    """Followers for whom there is no room in this step lose nothing by another's computing."""
    prompts = [like(i, 16, 1) for i in range(1, 9)]
    assert admitted(manager_of(overhead=64), *prompts, budget=17 + 63).admitted_ids[:3] == [1, 2, 3]
    assert admitted(manager_of(overhead=64), *prompts, budget=17 + 64).admitted_ids == [1]


def test_it_waits_where_that_delays_nobody() -> None:
    """A prompt that this step cannot finish anyway is served as soon when it waits, whatever a step costs."""
    manager = manager_of(overhead=10_000)
    prompts = [like(1, 8, 4), like(2, 8, 4)]
    assert admitted(manager, *prompts, budget=20).admitted_ids == [1]
    then = admitted(manager, prompts[1], step=2, budget=20)
    assert (then.admitted_ids, then.counts) == ([2], [4])


@pytest.mark.parametrize(("num_steps", "waits"), [(MAX_DELAY_STEPS, True), (MAX_DELAY_STEPS + 1, False)])
def test_it_waits_two_steps_at_most(num_steps: int, waits: bool) -> None:
    """For a leader that writes a block a step, a prompt that needs one step alone does not wait for three blocks."""
    manager = manager_of()
    assert admitted(manager, like(1, 32, 1), budget=4).counts == [4]
    follower = like(2, 4 + 4 * num_steps, 1)
    granted = manager.grant(reserve(2, SIZE, rows=[(1, 4, 4)], candidates=[follower]))
    assert granted.admitted_ids == ([] if waits else [2])


def test_long_prefixes_in_chunks_are_waited_for_from_beginning_to_end() -> None:
    """A prompt that would go through the same chunks itself is not delayed by waiting for all of them but by one."""
    manager = manager_of(overhead=24)
    leader, follower = like(1, 32, 1), like(2, 32, 1)
    assert admitted(manager, leader, follower, chunk=8).admitted_ids == [1]
    for step, start in enumerate((8, 16, 24), 2):
        proposal = reserve(step, SIZE, rows=[(1, start, 8)], candidates=[follower], chunk=8)
        assert manager.grant(proposal).admitted_ids == []
    last = manager.grant(reserve(5, SIZE, rows=[(1, 32, 1)], candidates=[follower], chunk=8))
    assert (last.admitted_ids, last.admitted_reused) == ([2], [32])


def test_patience_ends() -> None:
    """Where a leader's steps fail one after the other, a follower goes on after two steps more than it expected."""
    manager = manager_of()
    admitted(manager, like(1, 32, 1), budget=4)
    follower = like(2, 12, 1)  # two steps behind
    waits = []
    for step in range(2, 9):
        failed = [step - 1] if step > 2 else []
        proposal = reserve(step, SIZE, failed=failed, rows=[(1, 4, 4)], candidates=[follower])
        waits.append(not manager.grant(proposal).admitted_ids)
        if not waits[-1]:
            break
    assert waits == [True] * (2 + MAX_DELAY_STEPS) + [False]


def test_nobody_waits_for_what_no_row_of_the_step_writes() -> None:
    """Neither for a chunk that ends within a block, nor for a row of before a reset, nor with other tokens."""
    manager = manager_of()
    assert admitted(manager, like(1, 8, 1), like(2, 8, 1), budget=3).admitted_ids == [1]
    granted = manager.grant(reserve(2, SIZE, reset=True, rows=[(1, 3, 6)], candidates=[like(2, 8, 1)]))
    assert (granted.admitted_ids, granted.admitted_reused) == ([2], [0])
    assert admitted(manager_of(), like(1, 8, 1), Candidate(2, [7] * 9, 9)).admitted_ids == [1, 2]
    assert admitted(manager_of(), like(1, 8, 1), Candidate(2, SHARED[:8], 8, "b")).admitted_ids == [1, 2]


def test_those_behind_are_not_held_up() -> None:
    """Who has nothing in common with anybody is admitted in the step in which others wait."""
    assert admitted(manager_of(), like(1, 8, 1), like(2, 8, 1), Candidate(3, [7] * 9, 9)).admitted_ids == [1, 3]


@given(chains=st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=2, max_size=2), data=st.data())
def test_shared_keys_are_counted_as_by_comparing_them(chains: list[list[int]], data: st.DataObject) -> None:
    """The search by halves finds what a comparison key by key finds."""
    keys, others = (keys_of("a", tokens, 1) for tokens in chains)
    same = [a == b for a, b in zip(keys, others, strict=False)]
    num_same = same.index(False) if False in same else len(same)
    if num_same:
        low, limit = data.draw(st.integers(0, num_same - 1)), data.draw(st.integers(num_same, len(keys)))
        assert _num_shared(keys, others, low, limit) == num_same
