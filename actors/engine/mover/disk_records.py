"""How blocks lie in a segment file: sizes, offsets, and the two kinds of pages that describe them.

    segment   a page that says what the file is, then records
    record    a block, padded to whole pages, then a page with its header

Used by `disk_segments.py` and `disk_scan.py`. The page of a record follows its block because they are written in this
order: where it is, the block was written before, whenever the process was killed.

What must always hold: a page is used only if its checksum is right, and it is that of its segment and position, so that
neither a torn page nor one that lies elsewhere is mistaken for another.
"""

from __future__ import annotations

import struct
import zlib

import attrs

from .block_header import BlockHeader
from .disk_io import PAGE_BYTES

MAX_SEGMENTS = 64
MIN_SEGMENTS = 2
"""One is written while the other keeps its blocks."""
VERSION = 1
MAGIC = b"quipukvS"
"""How every segment file begins."""
RECORD_MAGIC = b"quipukvR"
MAX_NAME_BYTES = 64
"""Of a key, and of the numerics."""
MAX_SEQUENCE = 2**62
"""A file with a higher sequence number is not one of ours: there is always a next one."""

_SEGMENT = struct.Struct(f"<8sIQQH{MAX_NAME_BYTES}s")
_RECORD = struct.Struct(f"<8sIQIQQH{MAX_NAME_BYTES}sH{MAX_NAME_BYTES}s")
_CRC = struct.Struct("<I")
_CRC_AT = PAGE_BYTES - _CRC.size

UNREADABLE = BlockHeader(b"", 0, "", 0)
"""Stands for a header that cannot be read: equal to that of no block."""


@attrs.frozen
class DiskLayout:
    """How many blocks a disk tier has room for, and where they lie."""

    block_bytes: int
    blocks_per_segment: int
    num_segments: int

    @classmethod
    def of(cls, num_bytes: int, block_bytes: int) -> DiskLayout:
        """Return the layout for files of at most `num_bytes` in all. Raises ValueError if they hold no two blocks."""
        record_bytes = cls(block_bytes, 1, 1).record_bytes
        # the least of which no more than MAX_SEGMENTS segments have room
        per_segment = max(1, (num_bytes // (MAX_SEGMENTS + 1) - PAGE_BYTES) // record_bytes + 1)
        layout = cls(block_bytes, per_segment, num_bytes // (PAGE_BYTES + per_segment * record_bytes))
        if layout.num_segments < MIN_SEGMENTS:
            needed = MIN_SEGMENTS * (PAGE_BYTES + record_bytes)
            raise ValueError(f"--kv-disk-size of {num_bytes} bytes holds no two blocks: at least {needed} are needed")
        return layout

    @property
    def num_slots(self) -> int:
        return self.num_segments * self.blocks_per_segment

    @property
    def padded_bytes(self) -> int:
        """The block of a record."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        return self.padded_bytes + PAGE_BYTES

    @property
    def segment_bytes(self) -> int:
        return self.offset_of(self.blocks_per_segment)

    def offset_of(self, position: int) -> int:
        """Return where the record at a position begins."""
        return PAGE_BYTES + position * self.record_bytes

    def page_of(self, position: int) -> int:
        """Return where the page of the record at a position begins."""
        return self.offset_of(position) + self.padded_bytes

    def num_records(self, file_bytes: int) -> int:
        """Return how many whole records a file of this size has room for."""
        return max(0, min((file_bytes - PAGE_BYTES) // self.record_bytes, self.blocks_per_segment))


@attrs.frozen
class SegmentPage:
    """What a segment file's first page says."""

    sequence: int
    """Segments are numbered in the order in which they were begun."""
    block_bytes: int
    numerics: str


def write_segment_page(page: memoryview, content: SegmentPage) -> None:
    """Fill a page. Raises ValueError if the numerics' digest is too long."""
    numerics = _name_of(content.numerics.encode())
    _seal(page, _SEGMENT.pack(MAGIC, VERSION, content.sequence, content.block_bytes, len(numerics), numerics))


def read_segment_page(page: memoryview) -> SegmentPage | None:
    """Return what a page says; None if it is torn, or of another version."""
    if not _is_intact(page):
        return None
    magic, version, sequence, block_bytes, length, numerics = _SEGMENT.unpack_from(page)
    if magic != MAGIC or version != VERSION or not sequence < MAX_SEQUENCE:
        return None
    return SegmentPage(sequence, block_bytes, _text_of(numerics[:length]))


def write_record_page(page: memoryview, header: BlockHeader, sequence: int, position: int) -> None:
    """Fill the page of the record at a position in the segment with this sequence number.

    Raises ValueError if the key or the numerics' digest is too long.
    """
    key, numerics = _name_of(header.key), _name_of(header.numerics.encode())
    fields = (VERSION, sequence, position, header.num_tokens, header.checksum, len(key), key, len(numerics), numerics)
    _seal(page, _RECORD.pack(RECORD_MAGIC, *fields))


def read_record_page(page: memoryview, sequence: int, position: int) -> BlockHeader | None:
    """Return the header in a record's page; None if it is torn, or that of another segment or position."""
    if not _is_intact(page):
        return None
    magic, version, *place, num_tokens, checksum, key_bytes, key, length, numerics = _RECORD.unpack_from(page)
    if (magic, version, *place) != (RECORD_MAGIC, VERSION, sequence, position):
        return None
    return BlockHeader(key[:key_bytes], num_tokens, _text_of(numerics[:length]), checksum)


def _seal(page: memoryview, content: bytes) -> None:
    page[: len(content)] = content
    page[len(content) : _CRC_AT] = bytes(_CRC_AT - len(content))
    _CRC.pack_into(page, _CRC_AT, zlib.crc32(page[:_CRC_AT]))


def _is_intact(page: memoryview) -> bool:
    (crc,) = _CRC.unpack_from(page, _CRC_AT)
    return bool(crc == zlib.crc32(page[:_CRC_AT]))


def _name_of(content: bytes) -> bytes:
    if len(content) > MAX_NAME_BYTES:
        raise ValueError(f"{len(content)} bytes in a header's field; at most {MAX_NAME_BYTES} are allowed")
    return content


def _text_of(content: bytes) -> str:
    return content.decode(errors="replace")
