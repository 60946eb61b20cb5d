"""Which candidates wait for a prefix that another computes, one case at a time. Blocks are of 4 tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.block_manager.pending import MAX_DELAY_STEPS, _num_shared
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.scheduler import Granted
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, reserve

SIZE = 4
SHARED = list(range(100, 132))
LIMIT = 1 << 30


def manager_of(overhead: int = 0, num_usable: int = 200) -> BlockManager:
    return BlockManager(num_usable + 1, SIZE, share_pending_prefixes=True, step_overhead_tokens=overhead)


def sharing(sequence_id: int, num_shared: int, num_own: int) -> Candidate:
    """Make a candidate that starts with the shared prefix and continues on its own."""
    tokens = SHARED[:num_shared] + [sequence_id] * num_own
    return Candidate(sequence_id, tokens, len(tokens))


def admitted(
    manager: BlockManager, *candidates: Candidate, step: int = 1, budget: int = 1000, chunk: int = LIMIT
) -> Granted:
    proposal = reserve(step, SIZE, candidates=candidates, budget=budget, chunk=chunk)
    granted = manager.grant(proposal)
    check_manager(manager)
    return granted


def test_waits_if_savings_exceed_a_step() -> None:
    """Three followers save 8 tokens each, 24 in all, and are served from the cache by the next step."""
    manager = manager_of(overhead=24)
    prompts = [sharing(i, 8, 4) for i in range(1, 5)]
    assert admitted(manager, *prompts).admitted_ids == [1]
    then = admitted(manager, *prompts[1:], step=2)
    assert (then.admitted_ids, then.admitted_reused) == ([2, 3, 4], [8, 8, 8])


def test_computes_if_savings_are_below_a_step() -> None:
    """With one token less than a step costs, none waits: all are served at once."""
    assert admitted(manager_of(overhead=25), *[sharing(i, 8, 4) for i in range(1, 5)]).admitted_ids == [
        1,
        2,
        3,
        4,
    ]


def test_savings_are_limited_by_budget() -> None:
    """Followers for which this step has no room lose nothing if others compute."""
    prompts = [sharing(i, 16, 1) for i in range(1, 9)]
    assert admitted(manager_of(overhead=64), *prompts, budget=17 + 63).admitted_ids[:3] == [1, 2, 3]
    assert admitted(manager_of(overhead=64), *prompts, budget=17 + 64).admitted_ids == [1]


def test_waits_if_there_is_no_delay() -> None:
    """A prompt that this step cannot finish anyway is served as soon if it waits, whatever a step costs."""
    manager = manager_of(overhead=10_000)
    prompts = [sharing(1, 8, 4), sharing(2, 8, 4)]
    assert admitted(manager, *prompts, budget=20).admitted_ids == [1]
    then = admitted(manager, prompts[1], step=2, budget=20)
    assert (then.admitted_ids, then.counts) == ([2], [4])


@pytest.mark.parametrize(("num_steps", "waits"), [(MAX_DELAY_STEPS, True), (MAX_DELAY_STEPS + 1, False)])
def test_waits_at_most_two_steps(num_steps: int, waits: bool) -> None:
    """With a leader that writes one block per step, a prompt that needs one step of its own does not wait for three."""
    manager = manager_of()
    assert admitted(manager, sharing(1, 32, 1), budget=4).counts == [4]
    follower = sharing(2, 4 + 4 * num_steps, 1)
    granted = manager.grant(reserve(2, SIZE, rows=[(1, 4, 4)], candidates=[follower]))
    assert granted.admitted_ids == ([] if waits else [2])


def test_waits_for_chunked_prefix_to_the_end() -> None:
    """A prompt that would need the same chunks itself loses one step by waiting for all of them."""
    manager = manager_of(overhead=24)
    leader, follower = sharing(1, 32, 1), sharing(2, 32, 1)
    assert admitted(manager, leader, follower, chunk=8).admitted_ids == [1]
    for step, start in enumerate((8, 16, 24), 2):
        proposal = reserve(step, SIZE, rows=[(1, start, 8)], candidates=[follower], chunk=8)
        assert manager.grant(proposal).admitted_ids == []
    last = manager.grant(reserve(5, SIZE, rows=[(1, 32, 1)], candidates=[follower], chunk=8))
    assert (last.admitted_ids, last.admitted_reused) == ([2], [32])


def test_wait_is_bounded() -> None:
    """If a leader's steps keep failing, a follower computes after two steps more than it expected to wait."""
    manager = manager_of()
    admitted(manager, sharing(1, 32, 1), budget=4)
    follower = sharing(2, 12, 1)  # two steps behind
    waits = []
    for step in range(2, 9):
        failed = [step - 1] if step > 2 else []
        proposal = reserve(step, SIZE, failed=failed, rows=[(1, 4, 4)], candidates=[follower])
        waits.append(not manager.grant(proposal).admitted_ids)
        if not waits[-1]:
            break
    assert waits == [True] * (2 + MAX_DELAY_STEPS) + [False]


def test_no_wait_for_unwritten_blocks() -> None:
    """No candidate waits for a chunk that ends within a block, a row from before a reset, or different tokens."""
    manager = manager_of()
    assert admitted(manager, sharing(1, 8, 1), sharing(2, 8, 1), budget=3).admitted_ids == [1]
    granted = manager.grant(reserve(2, SIZE, reset=True, rows=[(1, 3, 6)], candidates=[sharing(2, 8, 1)]))
    assert (granted.admitted_ids, granted.admitted_reused) == ([2], [0])
    assert admitted(manager_of(), sharing(1, 8, 1), Candidate(2, [7] * 9, 9)).admitted_ids == [1, 2]
    assert admitted(manager_of(), sharing(1, 8, 1), Candidate(2, SHARED[:8], 8, "b")).admitted_ids == [1, 2]


def test_waiting_candidate_delays_no_other() -> None:
    """A candidate with no shared prefix is admitted in the step in which others wait."""
    assert admitted(manager_of(), sharing(1, 8, 1), sharing(2, 8, 1), Candidate(3, [7] * 9, 9)).admitted_ids == [1, 3]


@given(chains=st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=2, max_size=2), data=st.data())
def test_bisection_matches_linear_comparison(chains: list[list[int]], data: st.DataObject) -> None:
    """The bisection finds the same number of shared keys as a key-by-key comparison."""
    keys, others = (keys_of("a", tokens, 1) for tokens in chains)
    same = [a == b for a, b in zip(keys, others, strict=False)]
    num_same = same.index(False) if False in same else len(same)
    if num_same:
        low, limit = data.draw(st.integers(0, num_same - 1)), data.draw(st.integers(num_same, len(keys)))
        assert _num_shared(keys, others, low, limit) == num_same
