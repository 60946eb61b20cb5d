"""Segments with room in them, in the order in which they are filled.

The journal fills them from the event loop. New ones are allocated in a worker thread before they are needed or, in a
burst, on the spot; a lock keeps their numbers in order.

What must always hold: every byte counted here is already allocated on the disk.
"""

from __future__ import annotations

import threading

import attrs

from .entries import MAX_LINE_BYTES
from .segment_files import Position, SegmentFile, Storage


@attrs.define(eq=False)
class OpenSegment:
    """A segment that may still be written to."""

    number: int
    file: SegmentFile
    size: int
    used: int = 0

    @property
    def end(self) -> Position:
        return Position(self.number, self.used)

    @property
    def num_bytes(self) -> int:
        """Bytes that lines can use for certain: the last line that does not fit wastes less than its own length."""
        return max(0, self.size - self.used - MAX_LINE_BYTES)


class PreallocatedSegments:
    """The segment that is being filled, and the spare ones."""

    def __init__(self, storage: Storage, *, segment_bytes: int, next_number: int) -> None:
        """Allocate the first segment. Raises OSError."""
        self._storage = storage
        self._segment_bytes = segment_bytes
        self._next_number = next_number
        self._lock = threading.Lock()
        self._spare: list[OpenSegment] = []
        self.current = self._create()

    @property
    def num_bytes(self) -> int:
        """Bytes that lines can use, in all segments."""
        return self.current.num_bytes + sum(segment.num_bytes for segment in self._spare)

    @property
    def num_spare(self) -> int:
        return len(self._spare)

    def allocate(self, *, unless_spare: bool = False) -> None:
        """Allocate one more segment, or with `unless_spare` none if there is a spare one. Raises OSError.

        May be called in any thread.
        """
        with self._lock:
            if not (unless_spare and self._spare):
                self._spare.append(self._create())

    def advance(self) -> OpenSegment:
        """Move on to the next segment and return the full one. Raises OSError if a segment must be made and cannot."""
        full = self.current
        with self._lock:
            if not self._spare:
                self._spare.append(self._create())
            self.current = self._spare.pop(0)
        return full

    def close(self) -> None:
        for segment in (self.current, *self._spare):
            segment.file.close()

    def _create(self) -> OpenSegment:
        file = self._storage.create(self._next_number, self._segment_bytes)
        segment = OpenSegment(self._next_number, file, self._segment_bytes)
        self._next_number += 1
        return segment
