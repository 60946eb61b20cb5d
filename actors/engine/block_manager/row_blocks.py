"""Blocks for running sequences: each row of a step gets those that it lacks, at the expense of pins, then of others.

Pins give way first, then sequences are preempted in the order of `victim_ids` (`shared/preemption.py`). Since the last
grant, blocks may have been lent or taken for a load, so that the scheduler knew of more free ones and named no victims:
then a row that lacks blocks gets none, and the scheduler asks anew.

What must always hold: no sequence is preempted for blocks that only pins keep, nor one that the step has served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ...messages.block_manager import Reserve
from ...shared import preemption
from .grant_columns import GrantColumns
from .pins import Pins
from .pools import Pool
from .publications import Allocation


class RowBlocks:
    """Grants rows over one pool."""

    def __init__(
        self,
        pool: Pool,
        pins: Pins,
        allocations: Mapping[int, Allocation],
        block_size: int,
        *,
        take: Callable[[int, int], list[int]],
        release: Callable[[int], None],
    ) -> None:
        """`take` returns so many blocks for a sequence; `release` releases all that a sequence has."""
        self._pool = pool
        self._pins = pins
        self._allocations = allocations
        self._block_size = block_size
        self._take = take
        self._release = release

    def grant(self, reserve: Reserve, grant: GrantColumns) -> bool:
        """Add the rows of `reserve` that get their blocks, and whom that preempts. Return whether blocks ran out."""
        pool, size, allocations = self._pool, self._block_size, self._allocations
        victims = iter(reserve.victim_ids)
        preempted: set[int] = set()
        is_short = False
        for sequence_id, start, count in zip(reserve.row_ids, reserve.row_starts, reserve.row_counts, strict=True):
            if sequence_id in preempted:
                continue
            table = allocations[sequence_id].table
            missing = -(-(start + count) // size) - len(table)
            new_blocks: list[int] = []
            if missing > 0:
                if missing > pool.num_free and not self._release_pins(missing):
                    is_short = True
                    if not reserve.victim_ids or not self._preempt(missing, sequence_id, victims, grant, preempted):
                        continue
                new_blocks = self._take(missing, sequence_id)
                table += new_blocks
            grant.add(sequence_id, start, count, new_blocks)
        return is_short

    def _release_pins(self, num_blocks: int) -> bool:
        """Release pins until `num_blocks` are free, if that suffices; return whether it does."""
        while self._pool.num_free < num_blocks and self._pool.num_pinned_only:
            self._pins.give_way(num_blocks)
        return self._pool.num_free >= num_blocks

    def _preempt(
        self, num_blocks: int, sequence_id: int, victims: Iterator[int], grant: GrantColumns, preempted: set[int]
    ) -> bool:
        """Preempt until `num_blocks` are free. Return False if this took the sequence itself."""
        candidates = preemption.next_victims(victims, sequence_id, served=set(grant.sequence_ids))
        while not self._release_pins(num_blocks):
            victim_id = next(candidates)
            if victim_id not in self._allocations:
                continue
            self._release(victim_id)
            preempted.add(victim_id)
            grant.preempted_ids.append(victim_id)
            if victim_id == sequence_id:
                return False
        return True
