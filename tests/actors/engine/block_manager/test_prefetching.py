"""Loads for look-ups that ask for them: what they take, and what finds their blocks. Blocks are of 4 tokens."""

from __future__ import annotations

from quipu.actors.engine.block_manager.segment_index import StoredLog
from quipu.actors.messages.block_manager import LookUp
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.managed_tiers import KEYS, OTHER, PROMPT, SIZE, managed
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, reused_of, root_of


def look_up(prompt: list[int], *, prefetch: bool = True) -> LookUp:
    return LookUp(1, prompt, root_of("a", SIZE), keys_of("a", prompt, SIZE), prefetch=prefetch)


def test_prefetch() -> None:
    """A look-up that asks for it has blocks loaded; the next prompt finds them on the device and waits for nothing."""
    engine = managed(log=StoredLog([(slot, key) for slot, key in enumerate(KEYS)], head=0, next_position=3))
    assert engine.manager.look_up(look_up(PROMPT, prefetch=False)).prefetching_tokens == 0
    assert engine.moves() == []
    found = engine.manager.look_up(look_up(PROMPT))
    assert (found.num_tokens_by_tier, found.prefetching_tokens) == ({"disk": 12}, 12)
    check_manager(engine.manager)
    assert engine.manager.look_up(look_up(PROMPT)).prefetching_tokens == 0, "it is on its way"
    engine.end_all()
    granted = engine.grant(Candidate(1, PROMPT, 13))
    assert reused_of(granted) == {1: 12}
    assert granted.admitted_tier_spans == [], "it was on the device when the sequence came"


def test_candidate_waits_for_a_prefetch() -> None:
    """A prompt that comes while its blocks are on their way waits for them, and loads none twice."""
    engine = managed(log=StoredLog([(slot, key) for slot, key in enumerate(KEYS)], head=0, next_position=3))
    engine.manager.look_up(look_up(PROMPT))
    (move,) = engine.moves()
    assert engine.grant(Candidate(1, PROMPT, 13)).loading_ids == [1]
    assert engine.moves() == []
    assert engine.end(move) == (1,)
    assert reused_of(engine.grant(Candidate(1, PROMPT, 13))) == {1: 12}


def test_prefetch_takes_only_free_blocks() -> None:
    """Without room nothing is prefetched, or only the beginning; blocks that the last grant copies from are left."""
    stored = StoredLog([(slot, key) for slot, key in enumerate(KEYS)], head=0, next_position=3)
    engine = managed(6, log=stored)
    engine.grant(Candidate(1, OTHER, 13))
    assert engine.manager.look_up(look_up(PROMPT)).prefetching_tokens == SIZE
    full = managed(5, log=stored)
    full.grant(Candidate(1, OTHER, 13))
    assert full.manager.look_up(look_up(PROMPT)).prefetching_tokens == 0
    check_manager(full.manager)
    copying = managed(5, log=stored)
    whole = OTHER[:12]
    copying.grant(Candidate(1, whole, 12))
    copying.grant()
    copying.end_all()
    granted = copying.grant(Candidate(2, whole, 12))
    (source,) = granted.admitted_copy_sources
    assert source and copying.manager.pool.num_free == 1, "the only free block must be the one that is copied"
    assert copying.manager.look_up(look_up(PROMPT)).prefetching_tokens == 0
    check_manager(copying.manager)
