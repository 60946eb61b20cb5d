"""The block manager's grants, one rule at a time. Blocks are of 4 tokens."""

from __future__ import annotations

from quipu.actors.engine.block_manager.reservation import BlockManager
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import Candidate, Filled, keys_of, reserve, reused_of, written_of

SIZE = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def manager_of(num_usable: int, **settings: int | bool) -> BlockManager:
    return BlockManager(num_usable + 1, SIZE, **settings)


def candidate(sequence_id: int, tokens: list[int] = PROMPT, domain: str = "a") -> Candidate:
    return Candidate(sequence_id, tokens, len(tokens), domain)


def warm(manager: BlockManager, tokens: list[int] = PROMPT) -> None:
    """Compute `tokens` as sequence 100 in step 1, commit the step and end the sequence."""
    manager.grant(reserve(1, SIZE, candidates=[candidate(100, tokens)]))
    manager.grant(reserve(2, SIZE, committed=[1], free=[100]))


def test_longest_prefix_of_full_blocks_is_granted() -> None:
    """Ten tokens leave two full blocks; a prompt that differs in the second gets one."""
    manager = manager_of(20)
    warm(manager)
    granted = manager.grant(
        reserve(3, SIZE, candidates=[candidate(1), candidate(2, [*PROMPT[:6], 0, 0, 0, 0]), candidate(3, [9] * 9)])
    )
    assert reused_of(granted) == {1: 8, 2: 4, 3: 0}
    assert granted.starts == [8, 4, 0]
    assert granted.counts == [2, 6, 9]


def test_last_token_is_always_computed() -> None:
    """A prompt of exactly two cached blocks is granted one of them; with one token more it is granted both."""
    manager = manager_of(20)
    warm(manager, PROMPT[:8])
    granted = manager.grant(reserve(3, SIZE, candidates=[candidate(1, PROMPT[:8]), candidate(2, PROMPT[:9])]))
    assert reused_of(granted) == {1: 4, 2: 8}


def test_domains_share_nothing() -> None:
    """The same tokens under another root key are not found."""
    manager = manager_of(20)
    warm(manager)
    assert reused_of(manager.grant(reserve(3, SIZE, candidates=[candidate(1, domain="b")]))) == {1: 0}


def test_caching_disabled() -> None:
    """Grants are 0, not unknown, and no write is credited."""
    manager = manager_of(20, enable_prefix_caching=False)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    done = manager.grant(
        reserve(2, SIZE, committed=[1], filled=[Filled(1, 2, b"k")], free=[1], candidates=[candidate(2)])
    )
    assert reused_of(done) == {2: 0}
    assert written_of(done) == []
    assert done.num_cached_blocks == 0


def test_equal_prompts_in_one_step_share_nothing() -> None:
    """What a step writes is found from the next grant on; the first of the two sequences owns the write."""
    manager = manager_of(20)
    both = manager.grant(reserve(1, SIZE, candidates=[candidate(1), candidate(2)]))
    assert reused_of(both) == {1: 0, 2: 0}
    assert not set(both.new_blocks[0]) & set(both.new_blocks[1])
    after = manager.grant(reserve(2, SIZE, committed=[1], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 0, 8)]
    assert reused_of(after) == {3: 8}


def test_pending_block_is_granted_to_next_step() -> None:
    """A pending block can be granted, since it will be written by the time that step runs."""
    manager = manager_of(20)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    second = manager.grant(reserve(2, SIZE, candidates=[candidate(2)]))
    assert reused_of(second) == {2: 8}
    assert second.new_blocks[0][:2] == first.new_blocks[0][:2]


def test_own_chunks_are_not_hits() -> None:
    """Chunked prefill publishes as it proceeds, and is credited once, without a second admission."""
    manager = manager_of(20)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=5))
    assert (first.starts, first.counts) == ([0], [5])
    second = manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 5, 5)], victims=[1]))
    assert second.admitted_ids == []
    assert written_of(second) == [(1, 0, 4)]
    assert written_of(manager.grant(reserve(3, SIZE, committed=[2]))) == [(1, 4, 8)]


def test_decoded_block_is_cached_but_not_credited() -> None:
    """Outputs complete the prompt's third block: the next turn hits it, but no write is credited."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    answered = [*PROMPT, 11, 12, 13]
    key = keys_of("a", answered, SIZE)[2]
    manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 10, 1)]))
    manager.grant(reserve(3, SIZE, committed=[2], rows=[(1, 11, 1)]))
    after = manager.grant(
        reserve(4, SIZE, committed=[3], filled=[Filled(1, 2, key)], candidates=[candidate(2, answered)])
    )
    assert reused_of(after) == {2: 12}
    assert written_of(after) == []


def test_failed_step_is_rolled_back() -> None:
    """Nothing of the failed step is found, nor of the dropped step that depended on it."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    longer = [*PROMPT, 11, 12]
    dropped = manager.grant(reserve(2, SIZE, candidates=[candidate(2, [*longer, 13])]))
    assert reused_of(dropped) == {2: 8}
    after = manager.grant(reserve(3, SIZE, failed=[2, 1], free=[2, 1], candidates=[candidate(3, [*longer, 13])]))
    assert reused_of(after) == {3: 0}
    assert written_of(after) == []
    check_manager(manager)


def test_dropped_chunk_is_published_again() -> None:
    """When it runs again, its blocks are published again."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=4))
    manager.grant(reserve(2, SIZE, candidates=[candidate(2, [0] * 5)]))
    manager.grant(reserve(3, SIZE, rows=[(1, 4, 6)]))
    manager.grant(reserve(4, SIZE, committed=[1], failed=[3, 2], free=[2], rows=[(1, 4, 6)]))
    after = manager.grant(reserve(5, SIZE, committed=[4], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 4, 8)]
    assert reused_of(after) == {3: 8}


def test_chunk_publishes_keys_of_failed_owner() -> None:
    """Another step owned the chunk's keys and failed; run again, the chunk's own block is found."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=3))
    manager.grant(reserve(2, SIZE, committed=[1], candidates=[candidate(2)]))
    manager.grant(reserve(3, SIZE, rows=[(1, 3, 7)]))
    manager.grant(reserve(4, SIZE, failed=[3, 2], free=[2], rows=[(1, 3, 7)]))
    after = manager.grant(reserve(5, SIZE, committed=[4], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 0, 8)]
    assert reused_of(after) == {3: 8}


def test_manager_copies_keys() -> None:
    """A key list that grows after the Reserve publishes nothing: filled blocks are reported one by one."""
    manager = manager_of(20)
    proposal = reserve(1, SIZE, candidates=[candidate(1)])
    manager.grant(proposal)
    answered = [*PROMPT, 11, 12, 13]
    proposal.candidate_keys[0][:] = keys_of("a", answered, SIZE)
    manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 10, 2)]))
    assert reused_of(manager.grant(reserve(3, SIZE, committed=[2], candidates=[candidate(2, answered)]))) == {2: 8}


def test_write_is_credited_once() -> None:
    """If two sequences compute the same block in different steps, the first to commit owns it."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1), candidate(2)], budget=12))
    assert written_of(manager.grant(reserve(2, SIZE, rows=[(2, 2, 8)]))) == []
    assert written_of(manager.grant(reserve(3, SIZE, committed=[1, 2]))) == [(1, 0, 8)]


def test_evicted_key_is_not_credited() -> None:
    """A block that was evicted before its step is committed has another use by then."""
    manager = manager_of(3)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    manager.grant(reserve(2, SIZE, free=[1], candidates=[candidate(2, [0] * 12)]))
    assert written_of(manager.grant(reserve(3, SIZE, committed=[1, 2]))) == [(2, 0, 12)]


def test_victims_are_preempted_in_order() -> None:
    """No sequence served in this step is preempted, and none is admitted in a step that preempts."""
    manager = manager_of(5)
    others = [candidate(1, [1] * 4), candidate(2, [2] * 4), candidate(3, [3] * 8), candidate(4, [4] * 4)]
    manager.grant(reserve(1, SIZE, candidates=others))
    rows = [(1, 4, 1), (2, 4, 1), (3, 8, 1), (4, 4, 1)]
    granted = manager.grant(
        reserve(2, SIZE, committed=[1], rows=rows, victims=[4, 3, 2, 1], candidates=[candidate(5, [5])])
    )
    assert granted.num_free_blocks == 1
    assert granted.preempted_ids == [4, 3]
    assert granted.sequence_ids == [1, 2]
    assert granted.admitted_ids == []


def test_row_preempts_itself_last() -> None:
    """If all others have been served, the row that lacks blocks is preempted."""
    manager = manager_of(3)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 4), candidate(2, [2] * 4)]))
    granted = manager.grant(reserve(2, SIZE, rows=[(2, 4, 1), (1, 4, 1)], victims=[2, 1]))
    assert granted.preempted_ids == [1]
    assert granted.sequence_ids == [2]
    check_manager(manager)


def test_admission_respects_watermark() -> None:
    """A sequence that is alone may have every block."""
    manager = manager_of(4, watermark_blocks=2)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 8), candidate(2, [2] * 4)]))
    assert first.admitted_ids == [1]
    alone = manager.grant(reserve(2, SIZE, free=[1], candidates=[candidate(2, [2] * 16)]))
    assert alone.admitted_ids == [2]


def test_admission_needs_room_for_the_whole_prompt() -> None:
    """This holds even if the budget covers only a part of it; no candidate overtakes."""
    manager = manager_of(4)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 8)]))
    granted = manager.grant(reserve(2, SIZE, candidates=[candidate(2, [2] * 12), candidate(3, [3])], budget=4))
    assert granted.admitted_ids == []


def test_granted_blocks_do_not_count_as_room() -> None:
    """Free blocks that belong to the cached prefix cannot hold the rest of the prompt as well."""
    manager = manager_of(3)
    warm(manager)  # two cached, one blank
    granted = manager.grant(reserve(3, SIZE, candidates=[candidate(1, [*PROMPT, 11, 12, 13])]))
    assert granted.admitted_ids == []
    assert granted.num_cached_blocks == 2


def test_candidate_with_missing_keys_is_admitted() -> None:
    """Fewer keys than full blocks only mean fewer hits, also while another sequence's blocks are pending."""
    manager = BlockManager(20, 4, share_pending_prefixes=True)
    first, second = (Candidate(i, list(range(12)), 12) for i in (1, 2))
    proposal = reserve(1, 4, candidates=[first, second])
    proposal.candidate_keys[1] = []
    granted = manager.grant(proposal)
    assert granted.admitted_ids == [1, 2]
    check_manager(manager)
