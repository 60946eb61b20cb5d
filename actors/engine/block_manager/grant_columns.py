"""The columns of a `Granted` while the block manager fills them."""

from __future__ import annotations

from ...messages.block_manager import CacheMiss


class GrantColumns:
    """What a step is granted: rows, then admitted candidates."""

    __slots__ = (
        "admitted_copy_sources",
        "admitted_ids",
        "admitted_misses",
        "admitted_reused",
        "counts",
        "new_blocks",
        "preempted_ids",
        "sequence_ids",
        "starts",
    )

    def __init__(self) -> None:
        self.sequence_ids: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.new_blocks: list[list[int]] = []
        self.admitted_ids: list[int] = []
        self.admitted_reused: list[int] = []
        self.admitted_copy_sources: list[int] = []
        self.admitted_misses: list[CacheMiss] = []
        self.preempted_ids: list[int] = []

    def add(self, sequence_id: int, start: int, count: int, new_blocks: list[int]) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.counts.append(count)
        self.new_blocks.append(new_blocks)


class WrittenColumns:
    """Prompt positions in blocks that a sequence was the first to commit."""

    __slots__ = ("ends", "sequence_ids", "starts")

    def __init__(self) -> None:
        self.sequence_ids: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, sequence_id: int, start: int, end: int) -> None:
        self.sequence_ids.append(sequence_id)
        self.starts.append(start)
        self.ends.append(end)
