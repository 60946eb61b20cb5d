"""The blocks on disk: segments of an engine's own folder, and what was found in them at the start.

Called by the mover's carrier, from threads: one writes at a time, any number read. The block manager numbers the slots
(slot = segment * blocks_per_segment + position) and gives those of a segment out in ascending order. A slot before the
last that was written begins its segment anew.

What must always hold: what is returned was written by an engine of the same numerics, or is recognized by its header or
checksum; files have at most the given size together; an error leaves the store usable. Nothing is flushed (fsync): what
a killed process wrote stays, while a power cut may lose blocks of the last minute, which are then missing or corrupt,
and computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from .block_header import BlockHeader
from .disk_folder import lock_folder
from .disk_io import PAGE_BYTES, DiskCalls, PageBuffers, begins_at_page
from .disk_records import DiskLayout
from .disk_scan import holds_numerics, scan_folder
from .disk_segments import Segment
from .slot_store import MOST_TOGETHER


@attrs.frozen
class StoredSlot:
    """A slot that was found to hold a block."""

    slot: int
    key: bytes


@attrs.frozen
class _Run:
    """Blocks of a call, from index `first` on, that lie one after another in a segment."""

    first: int
    count: int
    segment: int
    position: int


class DiskStore:
    """Slots for blocks on a disk."""

    def __init__(
        self, path: Path, *, num_bytes: int, block_bytes: int, numerics: str, calls: DiskCalls | None = None
    ) -> None:
        """Open or create a folder below `path`, and scan it.

        Raises ValueError if `path` cannot be used, or `num_bytes` holds no two blocks.
        """
        self._calls = calls or DiskCalls()
        self._numerics = numerics
        self._layout = layout = DiskLayout.of(num_bytes, block_bytes)
        self._pages = PageBuffers(MOST_TOGETHER * PAGE_BYTES)
        self._copies = PageBuffers(MOST_TOGETHER * layout.padded_bytes)
        self._writing = threading.Lock()
        self._folder = lock_folder(path, lambda folder: holds_numerics(self._calls, folder, numerics))
        self.folder = self._folder.path
        """The engine's own."""
        try:
            scanned = scan_folder(self._calls, self._folder.descriptor, layout, numerics)
        except OSError as error:
            self._folder.close()
            raise ValueError(f"--kv-disk {path} cannot be used: {error.strerror or error}") from error
        self._next_sequence = scanned.next_sequence
        self.discarded = scanned.discarded
        """What was deleted because it has other numerics."""
        found = [each.segment for each in scanned.segments]
        self._segments: list[Segment | None] = [*found, *[None] * (layout.num_segments - len(found))]
        newest: dict[bytes, int] = {}
        for index, each in enumerate(scanned.segments):
            for position, key in each.keys.items():
                newest.pop(key, None)
                newest[key] = index * layout.blocks_per_segment + position
        self.stored = [StoredSlot(slot, key) for key, slot in newest.items()]
        """What was found, oldest first, each key once."""
        self.blank = range(0)
        """Slots after the last that was written, in the same segment: the next to be written. All segments after it are
        blank, too."""
        if found:
            first = (len(found) - 1) * layout.blocks_per_segment
            self.blank = range(first + found[-1].next_position, first + layout.blocks_per_segment)

    @property
    def num_slots(self) -> int:
        return self._layout.num_slots

    @property
    def blocks_per_segment(self) -> int:
        return self._layout.blocks_per_segment

    def write(self, slots: Sequence[int], headers: Sequence[BlockHeader], memory: memoryview) -> None:
        """Store blocks, which lie one after another in `memory`. Raises OSError, and then none of them is there.

        Faster if `memory` begins at a page and blocks are whole pages; otherwise they are copied once more.
        """
        with self._writing, self._pages.borrowed() as pages, ExitStack() as undo:
            for run in self._runs_of(slots):
                segment = self._segment_for(run)
                undo.callback(self._drop, run.segment, segment, segment.next_position)
                with self._source(segment, run, memory) as blocks:
                    segment.append(run.position, headers[run.first : run.first + run.count], blocks, pages)
            undo.pop_all()

    def read(self, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> list[BlockHeader | None]:
        """Fill `memory` with the blocks of `slots`, one after another, and return the header stored with each.

        None: the slot holds nothing, and its part of `memory` is undefined. Raises OSError. Faster if `memory` begins
        at a page and blocks are whole pages.
        """
        found: list[BlockHeader | None] = []
        with self._pages.borrowed() as pages:
            for run in self._runs_of(slots):
                segment = self._segments[run.segment]
                if segment is None:
                    found += [None] * run.count
                    continue
                with self._target(segment, run, memory) as blocks:
                    found += segment.read(run.position, blocks, pages)
        return found

    def clear(self) -> None:
        """Remove all that is stored. What is written later begins new files.

        Raises OSError, and then has removed what could be removed, and emptied the rest if possible.
        """
        failed: OSError | None = None
        with self._writing:
            for index, segment in enumerate(self._segments):
                if segment is None:
                    continue
                try:
                    segment.remove()
                    self._segments[index] = None
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Close all files, and leave the folder to others. No other call may be in progress, or follow."""
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._folder.close()

    def _segment_for(self, run: _Run) -> Segment:
        """Return the segment that a run is appended to, begun anew if it lies before the last that was written."""
        segment = self._segments[run.segment]
        if segment is not None and run.position >= segment.next_position:
            return segment
        if segment is not None:
            segment.remove()  # before the next one takes its space
            self._segments[run.segment] = None
        folder = self._folder.descriptor
        with self._pages.borrowed() as pages:
            while segment is None or segment.is_removed:
                sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
                with suppress(FileExistsError):  # somebody else's file has its name
                    segment = Segment.create(
                        self._calls, self._layout, folder, sequence, self._numerics, pages[:PAGE_BYTES]
                    )
        self._segments[run.segment] = segment
        return segment

    def _drop(self, index: int, segment: Segment, position: int) -> None:
        """Drop what a segment has from `position` on, and the segment if nothing is left."""
        segment.cut(position)
        if position == 0:
            with suppress(OSError):  # tried again before the segment is begun anew
                segment.remove()
                self._segments[index] = None

    def _runs_of(self, slots: Sequence[int]) -> Iterator[_Run]:
        """Yield the blocks of a call in runs of consecutive positions."""
        first = 0
        for end in range(1, len(slots) + 1):
            segment, position = divmod(slots[first], self.blocks_per_segment)
            if end < len(slots) and slots[end] == slots[end - 1] + 1 and slots[end] % self.blocks_per_segment:
                continue
            yield _Run(first, end - first, segment, position)
            first = end

    @contextmanager
    def _source(self, segment: Segment, run: _Run, memory: memoryview) -> Iterator[list[memoryview]]:
        """Yield the blocks of a run in whole pages."""
        blocks = self._blocks_of(run, memory)
        if self._are_in_pages(segment, memory):
            yield blocks
            return
        with self._copies.borrowed() as copies:
            for block, copy in zip(blocks, copied := self._copies_of(run, copies), strict=True):
                copy[: len(block)] = block
                copy[len(block) :] = bytes(len(copy) - len(block))
            yield copied

    @contextmanager
    def _target(self, segment: Segment, run: _Run, memory: memoryview) -> Iterator[list[memoryview]]:
        """Yield memory in whole pages for the blocks of a run, which have their bytes after the `with` block."""
        blocks = self._blocks_of(run, memory)
        if self._are_in_pages(segment, memory):
            yield blocks
            return
        with self._copies.borrowed() as copies:
            yield (copied := self._copies_of(run, copies))
            for block, copy in zip(blocks, copied, strict=True):
                block[:] = copy[: len(block)]

    def _blocks_of(self, run: _Run, memory: memoryview) -> list[memoryview]:
        size = self._layout.block_bytes
        return [memory[at * size : (at + 1) * size] for at in range(run.first, run.first + run.count)]

    def _copies_of(self, run: _Run, copies: memoryview) -> list[memoryview]:
        size = self._layout.padded_bytes
        return [copies[at * size : (at + 1) * size] for at in range(run.count)]

    def _are_in_pages(self, segment: Segment, memory: memoryview) -> bool:
        return self._layout.block_bytes == self._layout.padded_bytes and (
            not segment.is_direct or begins_at_page(memory)
        )
