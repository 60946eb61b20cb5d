"""One segment of the disk tier: a large file to which blocks are appended, and from which they are read.

Used by `disk_store.py`; made there anew, or by `disk_scan.py` from what an earlier process left. A segment is removed
as a whole, and its file is never begun again: a later one has another name and sequence number.

What must always hold: positions are written in ascending order, each once; a record that was not written completely is
not returned, in this process or after it; what is removed gives its space back at once, although reads of it may be in
progress, which find nothing then.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from .block_header import BlockHeader
from .disk_io import PAGE_BYTES, DiskCalls, PagedFile, open_pages, read_pages, write_pages
from .disk_records import (
    UNREADABLE,
    DiskLayout,
    SegmentPage,
    read_record_page,
    write_record_page,
    write_segment_page,
)

SEGMENT_NAME = re.compile("segment-([0-9]{19})")


def segment_name(sequence: int) -> str:
    return f"segment-{sequence:019}"


class Segment:
    """A segment file that is open."""

    def __init__(
        self, calls: DiskCalls, layout: DiskLayout, folder: int, file: PagedFile, sequence: int, written: Sequence[int]
    ) -> None:
        """`written` are the positions that hold records, ascending."""
        self._calls = calls
        self._layout = layout
        self._folder = folder
        self._file = file
        self.sequence = sequence
        self.next_position = written[-1] + 1 if written else 0
        """All positions from here on are blank."""
        self._is_written = [False] * layout.blocks_per_segment
        for position in written:
            self._is_written[position] = True
        self._lock = threading.Lock()
        self._num_readers = 0
        self.is_removed = False

    @classmethod
    def create(
        cls, calls: DiskCalls, layout: DiskLayout, folder: int, sequence: int, numerics: str, page: memoryview
    ) -> Segment:
        """Begin a segment; `page` is memory for its first page. Raises OSError, and then leaves no file."""
        write_segment_page(page, SegmentPage(sequence, layout.block_bytes, numerics))
        name = segment_name(sequence)
        for direct in (True, False):
            file = open_pages(folder, name, create=True, direct=direct)
            try:
                write_pages(calls, file, [page], 0)
            except OSError as error:
                os.close(file.descriptor)
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                if not file.is_direct or error.errno != errno.EINVAL:
                    raise
            else:
                return cls(calls, layout, folder, file, sequence, ())
        raise OSError(errno.EINVAL, "the file system accepts no page")

    @property
    def is_direct(self) -> bool:
        return self._file.is_direct

    def append(
        self, position: int, headers: Sequence[BlockHeader], blocks: Sequence[memoryview], pages: memoryview
    ) -> None:
        """Write records from `position` on, which is not before `next_position`.

        Each of `blocks` is padded to whole pages; `pages` is memory for the headers. Raises OSError, and then none of
        the records is there.
        """
        buffers = []
        for index, (header, block) in enumerate(zip(headers, blocks, strict=True)):
            page = pages[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
            write_record_page(page, header, self.sequence, position + index)
            buffers += [block, page]
        try:
            write_pages(self._calls, self._file, buffers, self._layout.offset_of(position))
        except OSError:
            self.cut(self.next_position)
            raise
        for index in range(position, position + len(headers)):
            self._is_written[index] = True
        self.next_position = position + len(headers)

    def cut(self, position: int) -> None:
        """Drop all records from `position` on."""
        for index in range(position, self.next_position):
            self._is_written[index] = False
        self.next_position = min(position, self.next_position)
        with suppress(OSError):  # what is left of them is overwritten, or recognized by its pages
            os.ftruncate(self._file.descriptor, self._layout.offset_of(position))

    def read(self, position: int, blocks: Sequence[memoryview], pages: memoryview) -> list[BlockHeader | None]:
        """Fill `blocks`, each padded to whole pages, with the records from `position` on, and return their headers.

        `pages` is memory for these. None: there is no record; UNREADABLE: there is one, and its page is damaged. Raises
        OSError.
        """
        with self._reading() as is_there:
            if not is_there:
                return [None] * len(blocks)
            buffers = []
            for index, block in enumerate(blocks):
                buffers += [block, pages[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]]
            num_read = read_pages(self._calls, self._file, buffers, self._layout.offset_of(position))
        headers: list[BlockHeader | None] = []
        for index, page in enumerate(buffers[1::2]):
            if not self._is_written[position + index] or num_read < (index + 1) * self._layout.record_bytes:
                headers.append(None)
            else:
                headers.append(read_record_page(page, self.sequence, position + index) or UNREADABLE)
        return headers

    @contextmanager
    def _reading(self) -> Iterator[bool]:
        """Keep the file open for the length of a block; False if it is removed."""
        with self._lock:
            is_there = not self.is_removed
            self._num_readers += is_there
        try:
            yield is_there
        finally:
            if is_there:
                with self._lock:
                    self._num_readers -= 1
                    self._close_if_unused()

    def remove(self) -> None:
        """Remove the file, and drop what it holds. May be called again if it raises OSError."""
        self.cut(0)
        self.next_position = self._layout.blocks_per_segment  # nothing is appended any more
        with suppress(FileNotFoundError):
            os.unlink(segment_name(self.sequence), dir_fd=self._folder)
        self.close()

    def close(self) -> None:
        """Close the file once nothing reads it."""
        with self._lock:
            if not self.is_removed:
                self.is_removed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.is_removed and not self._num_readers:
            os.close(self._file.descriptor)
