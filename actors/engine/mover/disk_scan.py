"""Finds what an earlier process left in the folder of a disk tier. Called by `disk_store.py` when it opens the folder.

What must always hold: only regular files with the name and the content of a segment, which belong to this user and have
no other name, are opened for more than a look, cut or deleted; what does not read right is not stored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import attrs

from .disk_io import PAGE_BYTES, DiskCalls, PageBuffers, PagedFile, open_pages, read_pages
from .disk_records import MAGIC, DiskLayout, SegmentPage, read_record_page, read_segment_page
from .disk_segments import SEGMENT_NAME, Segment, segment_name

SCANNING_THREADS = 8
"""A scan waits for the disk: one page of each record, wherever it is."""


@attrs.frozen
class ScannedSegment:
    """A segment that was found."""

    segment: Segment
    keys: dict[int, bytes]
    """By position, ascending; at least one."""


@attrs.define
class Discarded:
    """Segments that were deleted because other weights or another arithmetic computed them."""

    num_segments: int = 0
    num_bytes: int = 0


@attrs.frozen
class ScannedFolder:
    """What a folder contains."""

    segments: list[ScannedSegment]
    """In the order in which they were begun."""
    next_sequence: int
    discarded: Discarded


@attrs.frozen
class _FoundFile:
    """A segment file, open."""

    file: PagedFile
    num_bytes: int
    sequence: int
    """According to its name."""
    page: SegmentPage | None
    """None: it is torn, or of another version."""


def holds_numerics(calls: DiskCalls, folder: int, numerics: str) -> bool:
    """Return whether a folder has a segment with these numerics."""
    for found in _found_files(calls, folder):
        os.close(found.file.descriptor)
        if found.page is not None and found.page.numerics == numerics:
            return True
    return False


def scan_folder(calls: DiskCalls, folder: int, layout: DiskLayout, numerics: str) -> ScannedFolder:
    """Open all segments of a folder that can be used, and delete the others. Raises OSError."""
    discarded = Discarded()
    usable: list[_FoundFile] = []
    for found in _found_files(calls, folder):
        page = found.page
        if page == SegmentPage(found.sequence, layout.block_bytes, numerics):
            usable.append(found)
            continue
        if page is not None and page.numerics != numerics:
            discarded.num_segments += 1
            discarded.num_bytes += found.num_bytes
        _delete(folder, found)
    usable.sort(key=lambda found: found.sequence)
    next_sequence = usable[-1].sequence + 1 if usable else 0
    while len(usable) > layout.num_segments:
        _delete(folder, usable.pop(0))

    def scan(found: _FoundFile) -> ScannedSegment | None:
        keys = _keys_of(calls, layout, numerics, found)
        if not keys:
            _delete(folder, found)
            return None
        segment = Segment(calls, layout, folder, found.file, found.sequence, list(keys))
        if found.num_bytes > layout.offset_of(segment.next_position):
            segment.cut(segment.next_position)  # a torn record, or more than there is room for now
        return ScannedSegment(segment, keys)

    with ThreadPoolExecutor(SCANNING_THREADS, "scan") as pool:
        segments = [scanned for scanned in pool.map(scan, usable) if scanned is not None]
    return ScannedFolder(segments, next_sequence, discarded)


def _keys_of(calls: DiskCalls, layout: DiskLayout, numerics: str, found: _FoundFile) -> dict[int, bytes]:
    keys = {}
    with PageBuffers(PAGE_BYTES).borrowed() as page:
        for position in range(layout.num_records(found.num_bytes)):
            try:
                num_read = read_pages(calls, found.file, [page], layout.page_of(position))
            except OSError:
                continue  # a page that the disk has lost
            header = read_record_page(page, found.sequence, position) if num_read == PAGE_BYTES else None
            if header is not None and header.numerics == numerics:
                keys[position] = header.key
    return keys


def _found_files(calls: DiskCalls, folder: int) -> Iterator[_FoundFile]:
    """Open each file that is a segment of ours, and yield it, so that the caller closes it."""
    with PageBuffers(PAGE_BYTES).borrowed() as page:
        for name in sorted(os.listdir(folder)):
            matched = SEGMENT_NAME.fullmatch(name)
            if matched is None or not _is_ours(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                continue
            sequence = int(matched[1])
            opened = _open(calls, folder, name, page)
            if opened is None:
                continue
            file, num_read = opened
            if bytes(page[: len(MAGIC)]) not in (MAGIC, bytes(len(MAGIC))):
                os.close(file.descriptor)  # somebody else's
                continue
            content = read_segment_page(page) if num_read == PAGE_BYTES else None
            yield _FoundFile(file, os.fstat(file.descriptor).st_size, sequence, content)


def _open(calls: DiskCalls, folder: int, name: str, page: memoryview) -> tuple[PagedFile, int] | None:
    """Open a file and read its first page; None if it cannot be read."""
    for direct in (True, False):
        try:
            file = open_pages(folder, name, direct=direct)
        except OSError:
            return None
        try:
            if _is_ours(os.fstat(file.descriptor)):
                page[:] = bytes(PAGE_BYTES)
                return file, read_pages(calls, file, [page], 0)
        except OSError:
            pass  # some file systems refuse O_DIRECT only when they are to read
        os.close(file.descriptor)
    return None


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _delete(folder: int, found: _FoundFile) -> None:
    os.close(found.file.descriptor)
    with suppress(FileNotFoundError):
        os.unlink(segment_name(found.sequence), dir_fd=folder)
