"""The queue of a tier that outlives the engine: what is worth storing, and how much may wait."""

from __future__ import annotations

from quipu.actors.engine.block_manager.segment_index import SegmentIndex
from quipu.actors.engine.block_manager.write_behind import LONG_TOKENS, StorePolicy, WriteBehind
from quipu.actors.messages.tiers import Tier
from tests.actors.engine.block_manager.managed_tiers import KEYS, OTHER, PROMPT, SIZE, managed
from tests.actors.engine.block_manager.proposals import Candidate, keys_of


def test_only_reused_blocks() -> None:
    """With `reused`, a block is stored once a second prompt has it, cached or not."""
    engine = managed(policy=StorePolicy.REUSED)
    engine.grant(Candidate(1, PROMPT, 13))
    engine.grant()
    assert engine.moves() == []
    engine.grant(Candidate(2, PROMPT[:9], 9))
    (move,) = engine.moves()
    assert move.keys == KEYS[:2]
    queue = engine.tiers[Tier.DISK].queue
    assert queue is not None
    queue.on_stored(KEYS[2:], b"", PROMPT, 0, 2)
    assert queue.take(8) == KEYS[2:], "it was computed a second time"


def test_long_prompts_count_as_reused() -> None:
    """With `reused`, the blocks of long prompts are stored the first time."""
    index = SegmentIndex(2, 4)
    queue = WriteBehind(index, StorePolicy.REUSED, 10)
    queue.on_stored(KEYS, b"", [0] * (LONG_TOKENS - 1), 0, 0)
    assert len(queue) == 0
    queue.on_stored(keys_of("a", OTHER, SIZE), b"", [0] * LONG_TOKENS, 0, 0)
    assert len(queue) == 3


def test_queue_keeps_the_newest() -> None:
    """The queue is bounded: what has waited longest is dropped."""
    queue = WriteBehind(SegmentIndex(2, 4), StorePolicy.ALL, 2)
    queue.on_stored(KEYS, b"", PROMPT, 0, 0)
    assert queue.take(8) == KEYS[1:]
