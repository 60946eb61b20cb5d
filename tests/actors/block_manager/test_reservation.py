"""The block manager's walk, one rule at a time. Blocks are of 4 tokens."""

from __future__ import annotations

from quipu.actors.block_manager.reservation import BlockManager
from tests.actors.block_manager.proposals import Candidate, keys_of, reserve, reused_of, written_of

SIZE = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def manager_of(num_usable: int, **settings: int | bool) -> BlockManager:
    return BlockManager(num_usable + 1, SIZE, **settings)


def candidate(sequence_id: int, tokens: list[int] = PROMPT, domain: str = "a") -> Candidate:
    return Candidate(sequence_id, tokens, len(tokens), domain)


def warm(manager: BlockManager, tokens: list[int] = PROMPT) -> None:
    """Sequence 100 computes `tokens` in step 1, which is committed; then it ends."""
    manager.grant(reserve(1, SIZE, candidates=[candidate(100, tokens)]))
    manager.grant(reserve(2, SIZE, committed=[1], free=[100]))


def test_a_grant_is_the_longest_prefix_of_full_blocks() -> None:
    """Ten tokens leave two full blocks; a prompt that differs in the second gets one."""
    manager = manager_of(20)
    warm(manager)
    granted = manager.grant(
        reserve(3, SIZE, candidates=[candidate(1), candidate(2, [*PROMPT[:6], 0, 0, 0, 0]), candidate(3, [9] * 9)])
    )
    assert reused_of(granted) == {1: 8, 2: 4, 3: 0}
    assert granted.starts == [8, 4, 0]
    assert granted.counts == [2, 6, 9]


def test_one_token_is_always_computed() -> None:
    """A prompt of exactly two cached blocks is granted one of them, one token more is granted both."""
    manager = manager_of(20)
    warm(manager, PROMPT[:8])
    granted = manager.grant(reserve(3, SIZE, candidates=[candidate(1, PROMPT[:8]), candidate(2, PROMPT[:9])]))
    assert reused_of(granted) == {1: 4, 2: 8}


def test_domains_share_nothing() -> None:
    """The same tokens under another root key are not found."""
    manager = manager_of(20)
    warm(manager)
    assert reused_of(manager.grant(reserve(3, SIZE, candidates=[candidate(1, domain="b")]))) == {1: 0}


def test_without_caching_nothing_is_granted_or_written() -> None:
    """Grants are 0, a number, and no write is credited."""
    manager = manager_of(20, enable_prefix_caching=False)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    done = manager.grant(reserve(2, SIZE, committed=[1], filled=[(1, 2, b"k")], free=[1], candidates=[candidate(2)]))
    assert reused_of(done) == {2: 0}
    assert written_of(done) == []
    assert done.num_cached_blocks == 0


def test_equal_prompts_of_one_step_share_nothing() -> None:
    """What a step writes is found from the next walk on; the first of the two owns the write."""
    manager = manager_of(20)
    both = manager.grant(reserve(1, SIZE, candidates=[candidate(1), candidate(2)]))
    assert reused_of(both) == {1: 0, 2: 0}
    assert not set(both.new_blocks[0]) & set(both.new_blocks[1])
    after = manager.grant(reserve(2, SIZE, committed=[1], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 0, 8)]
    assert reused_of(after) == {3: 8}


def test_a_pending_block_is_granted_to_the_next_step() -> None:
    """It is written by the time that step runs."""
    manager = manager_of(20)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    second = manager.grant(reserve(2, SIZE, candidates=[candidate(2)]))
    assert reused_of(second) == {2: 8}
    assert second.new_blocks[0][:2] == first.new_blocks[0][:2]


def test_a_sequences_own_chunks_are_not_hits() -> None:
    """Chunked prefill publishes as it goes, and is credited once, without a second admission."""
    manager = manager_of(20)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=5))
    assert (first.starts, first.counts) == ([0], [5])
    second = manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 5, 5)], victims=[1]))
    assert second.admitted_ids == []
    assert written_of(second) == [(1, 0, 4)]
    assert written_of(manager.grant(reserve(3, SIZE, committed=[2]))) == [(1, 4, 8)]


def test_what_decoding_fills_is_cached_but_not_credited() -> None:
    """The prompt's third block is completed by outputs: the next turn hits it, nobody has written it."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    answered = [*PROMPT, 11, 12, 13]
    key = keys_of("a", answered, SIZE)[2]
    manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 10, 1)]))
    manager.grant(reserve(3, SIZE, committed=[2], rows=[(1, 11, 1)]))
    after = manager.grant(reserve(4, SIZE, committed=[3], filled=[(1, 2, key)], candidates=[candidate(2, answered)]))
    assert reused_of(after) == {2: 12}
    assert written_of(after) == []


def test_after_a_failed_step_nothing_of_it_is_found() -> None:
    """Nor anything of the dropped step that built on it."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    longer = [*PROMPT, 11, 12]
    dropped = manager.grant(reserve(2, SIZE, candidates=[candidate(2, [*longer, 13])]))
    assert reused_of(dropped) == {2: 8}
    after = manager.grant(reserve(3, SIZE, failed=[2, 1], free=[2, 1], candidates=[candidate(3, [*longer, 13])]))
    assert reused_of(after) == {3: 0}
    assert written_of(after) == []
    manager.check()


def test_a_dropped_chunk_is_published_again_when_it_is_run_again() -> None:
    """Its sequence loses the positions, not the ability to share them."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=4))
    manager.grant(reserve(2, SIZE, candidates=[candidate(2, [0] * 5)]))
    manager.grant(reserve(3, SIZE, rows=[(1, 4, 6)]))
    manager.grant(reserve(4, SIZE, committed=[1], failed=[3, 2], free=[2], rows=[(1, 4, 6)]))
    after = manager.grant(reserve(5, SIZE, committed=[4], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 4, 8)]
    assert reused_of(after) == {3: 8}


def test_a_chunk_whose_keys_were_taken_publishes_them_when_their_owner_has_failed() -> None:
    """Its block stood aside for one that another step should have written; run again, it is the one to be found."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)], budget=3))
    manager.grant(reserve(2, SIZE, committed=[1], candidates=[candidate(2)]))
    manager.grant(reserve(3, SIZE, rows=[(1, 3, 7)]))
    manager.grant(reserve(4, SIZE, failed=[3, 2], free=[2], rows=[(1, 3, 7)]))
    after = manager.grant(reserve(5, SIZE, committed=[4], candidates=[candidate(3)]))
    assert written_of(after) == [(1, 0, 8)]
    assert reused_of(after) == {3: 8}


def test_the_manager_keeps_its_own_keys() -> None:
    """A proposal's list that grows afterwards announces nothing: filled blocks are told one by one."""
    manager = manager_of(20)
    proposal = reserve(1, SIZE, candidates=[candidate(1)])
    manager.grant(proposal)
    answered = [*PROMPT, 11, 12, 13]
    proposal.candidate_keys[0][:] = keys_of("a", answered, SIZE)
    manager.grant(reserve(2, SIZE, committed=[1], rows=[(1, 10, 2)]))
    assert reused_of(manager.grant(reserve(3, SIZE, committed=[2], candidates=[candidate(2, answered)]))) == {2: 8}


def test_a_write_is_credited_once_however_often_it_is_done() -> None:
    """Two sequences compute the same block in different steps: the first to commit owns it."""
    manager = manager_of(20)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1), candidate(2)], budget=12))
    assert written_of(manager.grant(reserve(2, SIZE, rows=[(2, 2, 8)]))) == []
    assert written_of(manager.grant(reserve(3, SIZE, committed=[1, 2]))) == [(1, 0, 8)]


def test_a_key_that_was_evicted_before_its_commit_is_nobodys_write() -> None:
    """Its block has another use by then."""
    manager = manager_of(3)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1)]))
    manager.grant(reserve(2, SIZE, free=[1], candidates=[candidate(2, [0] * 12)]))
    assert written_of(manager.grant(reserve(3, SIZE, committed=[1, 2]))) == [(2, 0, 12)]


def test_victims_fall_in_order_until_it_suffices() -> None:
    """Nobody who was served in this step is preempted, and nobody is admitted in a step that preempts."""
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


def test_a_row_that_cannot_be_served_preempts_itself_last() -> None:
    """Where everybody else has been served, the row that lacks blocks is the one to go."""
    manager = manager_of(3)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 4), candidate(2, [2] * 4)]))
    granted = manager.grant(reserve(2, SIZE, rows=[(2, 4, 1), (1, 4, 1)], victims=[2, 1]))
    assert granted.preempted_ids == [1]
    assert granted.sequence_ids == [2]
    manager.check()


def test_an_admission_leaves_the_watermark_while_others_run() -> None:
    """Alone, a sequence may have every block."""
    manager = manager_of(4, watermark_blocks=2)
    first = manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 8), candidate(2, [2] * 4)]))
    assert first.admitted_ids == [1]
    alone = manager.grant(reserve(2, SIZE, free=[1], candidates=[candidate(2, [2] * 16)]))
    assert alone.admitted_ids == [2]


def test_admission_needs_room_for_the_whole_prompt() -> None:
    """Even where the budget lets it begin with less; and nobody overtakes."""
    manager = manager_of(4)
    manager.grant(reserve(1, SIZE, candidates=[candidate(1, [1] * 8)]))
    granted = manager.grant(reserve(2, SIZE, candidates=[candidate(2, [2] * 12), candidate(3, [3])], budget=4))
    assert granted.admitted_ids == []


def test_a_cached_block_that_is_granted_is_not_counted_as_room() -> None:
    """Free blocks that the prefix itself takes cannot hold the rest of the prompt as well."""
    manager = manager_of(3)
    warm(manager)  # two cached, one blank
    granted = manager.grant(reserve(3, SIZE, candidates=[candidate(1, [*PROMPT, 11, 12, 13])]))
    assert granted.admitted_ids == []
    assert granted.num_cached_blocks == 2


def test_a_candidate_without_all_its_keys_is_admitted() -> None:
    """Fewer keys than full blocks only mean fewer hits, also while somebody else's blocks are waited for."""
    manager = BlockManager(20, 4, share_pending_prefixes=True)
    first, second = (Candidate(i, list(range(12)), 12) for i in (1, 2))
    proposal = reserve(1, 4, candidates=[first, second])
    proposal.candidate_keys[1] = []
    granted = manager.grant(proposal)
    assert granted.admitted_ids == [1, 2]
    manager.check()
