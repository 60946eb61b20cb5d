"""Which blocks of running sequences can be found by their keys: published, then committed or rolled back.

Used by `reservation.py`. A step publishes the keys of the blocks it is about to write, so that later steps can be
granted them. They become committed when the step is done, and are taken back when it fails.

What must always hold: a key is published by a sequence admitted in the current epoch only, that is, since the cache was
last reset; each prompt block is reported as written by the sequence that committed it first, and once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

from ...messages.block_manager import Reserve
from .grant_columns import GrantColumns, WrittenColumns
from .pool_state import COMMITTED
from .pools import Pool


@attrs.define(eq=False)
class Allocation:
    """The blocks of one admitted sequence."""

    table: list[int]
    keys: list[bytes]
    """Chain keys of the tokens known at its admission, and of blocks that decoding has filled since."""
    num_prompt_blocks: int
    """Blocks that the prompt alone fills: only these are reported as *written*."""
    num_published: int
    """Blocks at the front of the table whose keys are settled: found in the cache, published, or already taken."""
    epoch: int
    """Cache resets before its admission: what it writes is published in this epoch only."""
    root_key: bytes
    token_ids: list[int]
    """Its tokens at its admission."""
    tenant: str = ""
    """Empty: it does not matter."""


@attrs.define(eq=False)
class Publication:
    """Keys that a step published for one sequence, to be committed or rolled back."""

    sequence_id: int
    allocation: Allocation
    first: int
    """The blocks `first:end` of the sequence's table."""
    end: int


class Publications:
    """The publications of all steps that are not answered yet, on one pool."""

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.epoch = 0
        """Cache resets so far: nothing more is published for sequences admitted before the last."""
        self._pool = pool
        self._block_size = block_size
        self._by_step: dict[int, list[Publication]] = {}

    def publish(self, step: int, grant: GrantColumns, allocations: Mapping[int, Allocation]) -> None:
        """Publish the full blocks that a granted step will have written."""
        publications = []
        size, publish = self._block_size, self._pool.publish
        for sequence_id, start, count in zip(grant.sequence_ids, grant.starts, grant.counts, strict=True):
            allocation = allocations[sequence_id]
            if allocation.epoch != self.epoch:
                continue
            first, end = allocation.num_published, min((start + count) // size, len(allocation.keys))
            if first < end:
                publish(allocation.table[first:end], allocation.keys[first:end], step)
                # recorded even if other blocks own the keys: a roll-back must return to the first of these blocks
                publications.append(Publication(sequence_id, allocation, first, end))
                allocation.num_published = end
        if publications:
            self._by_step[step] = publications

    def publish_filled(self, reserve: Reserve, allocations: Mapping[int, Allocation]) -> None:
        """Publish blocks that decoding has filled. They are written, so they are committed at once."""
        for sequence_id, index, key, parent_key, token_ids in zip(
            reserve.filled_sequence_ids,
            reserve.filled_block_indexes,
            reserve.filled_keys,
            reserve.filled_parent_keys,
            reserve.filled_token_ids,
            strict=True,
        ):
            allocation = allocations.get(sequence_id)
            if allocation is not None and allocation.num_published == index and allocation.epoch == self.epoch:
                if self._pool.publish([allocation.table[index]], [key], COMMITTED):
                    for observer in self._pool.observers:
                        observer.on_stored([key], parent_key, token_ids, 0, index, sequence_id)
                if len(allocation.keys) == index:
                    allocation.keys.append(key)
                allocation.num_published = index + 1

    def commit(self, steps: Iterable[int], broken_ids: Collection[int] = ()) -> WrittenColumns:
        """Commit what these steps published, but take it back for sequences with `broken_ids`.

        Returns the prompt blocks that each sequence was the first to commit.
        """
        written = WrittenColumns()
        pool, size = self._pool, self._block_size
        for step in steps:
            for publication in self._by_step.pop(step, ()):
                allocation, first = publication.allocation, publication.first
                if publication.sequence_id in broken_ids:
                    self._take_back(publication, step)
                    continue
                for run in pool.commit(allocation.table[first : publication.end], step):
                    begin, end = first + run.start, first + run.stop
                    if pool.observers:
                        self._notify_stored(publication.sequence_id, allocation, begin, end)
                    end = min(end, allocation.num_prompt_blocks)
                    if begin < end:
                        written.add(publication.sequence_id, begin * size, end * size)
        return written

    def roll_back(self, step: int) -> None:
        """Take back what a failed step published."""
        for publication in reversed(self._by_step.pop(step, [])):
            self._take_back(publication, step)

    def roll_back_all(self) -> None:
        """Take back what every step published that is not answered, newest first."""
        for step in sorted(self._by_step, reverse=True):
            self.roll_back(step)

    def _take_back(self, publication: Publication, step: int) -> None:
        allocation, unpublish = publication.allocation, self._pool.unpublish
        for block in reversed(allocation.table[publication.first : publication.end]):
            unpublish(block, step)
        allocation.num_published = min(allocation.num_published, publication.first)

    def _notify_stored(self, sequence_id: int, allocation: Allocation, begin: int, end: int) -> None:
        """Tell observers that the blocks `begin:end` of a sequence can be found."""
        keys = allocation.keys
        for observer in self._pool.observers:
            parent_key = keys[begin - 1] if begin else allocation.root_key
            start = begin * self._block_size
            observer.on_stored(keys[begin:end], parent_key, allocation.token_ids, start, begin, sequence_id)
