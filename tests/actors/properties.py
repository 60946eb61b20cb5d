"""Properties of a grant that several state machines check."""

from __future__ import annotations

from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.scheduler import Granted


def check_writes_are_private(manager: BlockManager, granted: Granted) -> None:
    """Check that a step's rows write only to blocks that no other sequence holds, and that none can be found, unless
    this step has published it."""
    state, size = manager.pool.state(), manager.block_size
    tables = {sequence_id: allocation.table for sequence_id, allocation in manager.allocations.items()}
    for sequence_id, start, count in zip(granted.sequence_ids, granted.starts, granted.counts, strict=True):
        for block in tables[sequence_id][start // size : -(-(start + count) // size)]:
            assert [i for i, table in tables.items() if block in table] == [sequence_id], "a shared block is written"
            if state.keys[block] is not None:
                assert state.pending.get(block) == granted.step, "a block is written that could be found before"
