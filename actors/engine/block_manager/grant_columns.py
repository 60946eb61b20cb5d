"""The columns of a `Granted` while the block manager fills them."""

from __future__ import annotations

import attrs

from ...messages.block_manager import CacheMiss


@attrs.define
class GrantColumns:
    """What a step is granted: rows, then admitted candidates."""

    sequence_ids: list[int] = attrs.field(factory=list)
    starts: list[int] = attrs.field(factory=list)
    counts: list[int] = attrs.field(factory=list)
    new_blocks: list[list[int]] = attrs.field(factory=list)
    admitted_ids: list[int] = attrs.field(factory=list)
    admitted_reused: list[int] = attrs.field(factory=list)
    admitted_copy_sources: list[int] = attrs.field(factory=list)
    admitted_misses: list[CacheMiss] = attrs.field(factory=list)
    preempted_ids: list[int] = attrs.field(factory=list)

    def add(self, sequence_id: int, start: int, count: int, new_blocks: list[int]) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.counts.append(count)
        self.new_blocks.append(new_blocks)


@attrs.define
class WrittenColumns:
    """Prompt positions in blocks that a sequence was the first to commit."""

    sequence_ids: list[int] = attrs.field(factory=list)
    starts: list[int] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)

    def add(self, sequence_id: int, start: int, end: int) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.ends.append(end)
