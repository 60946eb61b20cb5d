"""Segment files that are torn, cut, mixed up or damaged: nothing wrong is returned as a block."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import attrs
import pytest

from quipu.actors.engine.mover.disk_io import PAGE_BYTES
from quipu.actors.engine.mover.disk_records import (
    MAGIC,
    MAX_SEQUENCE,
    VERSION,
    DiskLayout,
    SegmentPage,
    read_record_page,
    read_segment_page,
    write_record_page,
    write_segment_page,
)
from quipu.actors.engine.mover.disk_segments import segment_name

from .disk_bench import BLOCK_BYTES, NUMERICS, bytes_for, header_of, open_store, read, write

NUM_BLOCKS = 320
"""In segments of 5."""
LAYOUT = DiskLayout.of(bytes_for(NUM_BLOCKS), BLOCK_BYTES)


def filled(tmp_path: Path) -> Path:
    """Return a folder with two segments: the blocks 0 to 4 and 5 to 7."""
    store = open_store(tmp_path, num_blocks=NUM_BLOCKS)
    write(store, range(8), range(8))
    store.close()
    return store.folder


def names_found(tmp_path: Path) -> list[int | str | None]:
    """Return what a later process reads of the blocks that it finds."""
    store = open_store(tmp_path, num_blocks=NUM_BLOCKS)
    try:
        names = [name for stored in store.stored for name in read(store, [stored.slot])]
        for stored, name in zip(store.stored, names, strict=True):
            assert name in {int.from_bytes(stored.key, "big"), "corrupt"}
        return names
    finally:
        store.close()


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_layout() -> None:
    assert (LAYOUT.num_segments, LAYOUT.blocks_per_segment) == (64, 5)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("content", [bytes(2048), bytes([255]) * 2048])
def test_torn_record_page(tmp_path: Path, half: int, content: bytes) -> None:
    """A record of whose page half was written is missing, and all others are there."""
    folder = filled(tmp_path)
    overwrite(folder / segment_name(0), LAYOUT.page_of(2) + 2048 * half, content)
    assert names_found(tmp_path) == [0, 1, 3, 4, 5, 6, 7]


def test_torn_block(tmp_path: Path) -> None:
    """A record of whose block a page was not written is corrupt."""
    folder = filled(tmp_path)
    overwrite(folder / segment_name(0), LAYOUT.offset_of(2) + PAGE_BYTES, bytes(PAGE_BYTES))
    assert names_found(tmp_path) == [0, 1, "corrupt", 3, 4, 5, 6, 7]


def test_every_bit_of_a_page(tmp_path: Path) -> None:
    """A flipped bit anywhere in a page that describes makes it unreadable."""
    pages = [bytearray(PAGE_BYTES), bytearray(PAGE_BYTES)]
    write_segment_page(memoryview(pages[0]), SegmentPage(3, BLOCK_BYTES, NUMERICS))
    write_record_page(memoryview(pages[1]), header_of(5), 3, 2)
    assert read_segment_page(memoryview(pages[0])) == SegmentPage(3, BLOCK_BYTES, NUMERICS)
    assert read_record_page(memoryview(pages[1]), 3, 2) == header_of(5)
    for bit in range(8 * PAGE_BYTES):
        for page in pages:
            page[bit // 8] ^= 1 << bit % 8
        assert read_segment_page(memoryview(pages[0])) is None
        assert read_record_page(memoryview(pages[1]), 3, 2) is None
        for page in pages:
            page[bit // 8] ^= 1 << bit % 8


def test_damaged_while_open(tmp_path: Path) -> None:
    """A record that is damaged after it was written is corrupt, whether in its block or its page; one that was cut off
    is missing."""
    store = open_store(tmp_path, num_blocks=NUM_BLOCKS)
    write(store, range(8), range(8))
    path = store.folder / segment_name(0)
    overwrite(path, LAYOUT.offset_of(0) + 5000, b"!")
    overwrite(path, LAYOUT.page_of(1) + 20, b"!")
    overwrite(path, LAYOUT.page_of(2) + 4000, b"!")
    assert read(store, range(8)) == ["corrupt", "corrupt", "corrupt", 3, 4, 5, 6, 7]
    with path.open("r+b") as file:
        file.truncate(LAYOUT.page_of(4))
    assert read(store, [3, 4, 5]) == [3, None, 5]
    with path.open("r+b") as file:
        file.truncate(LAYOUT.page_of(3) + 100)
    assert read(store, [3, 4, 5]) == [None, None, 5]
    path.unlink()
    assert read(store, [5]) == [5]
    store.close()


def test_cut_anywhere(tmp_path: Path) -> None:
    """Of a file that was cut, the records before the cut are found, and new ones are appended to them."""
    folder = filled(tmp_path)
    path = folder / segment_name(1)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 2048), 1, 8, 4095, 4097, len(whole) - 1]:
        path.write_bytes(whole[:size])
        num_left = max(0, (size - PAGE_BYTES) // LAYOUT.record_bytes)
        assert names_found(tmp_path) == list(range(5 + num_left)), size
        store = open_store(tmp_path, num_blocks=NUM_BLOCKS)
        if num_left:
            assert store.blank == range(5 + num_left, 10)
            write(store, [5 + num_left], [50])
            assert read(store, range(10)) == [*range(5 + num_left), 50, *[None] * (4 - num_left)]
        store.close()
        for file in folder.glob("segment-*"):
            if file.name not in {segment_name(0), path.name}:
                file.unlink()


def test_zeros_at_the_end(tmp_path: Path) -> None:
    """A file to whose end the disk added zeros, as after a power cut, has its records, and is cut after them."""
    folder = filled(tmp_path)
    path = folder / segment_name(1)
    size = path.stat().st_size
    overwrite(path, size, bytes(5000))
    (folder / segment_name(2)).write_bytes(bytes(20_000))
    (folder / segment_name(3)).write_bytes(b"")
    assert names_found(tmp_path) == list(range(8))
    assert sorted(file.name for file in folder.glob("segment-*")) == [segment_name(0), segment_name(1)]
    assert path.stat().st_size == size


def test_records_in_another_place(tmp_path: Path) -> None:
    """A record that lies where another should be, in its own segment or another, is not found there."""
    folder = filled(tmp_path)
    first = (folder / segment_name(0)).read_bytes()
    record = first[LAYOUT.offset_of(3) : LAYOUT.offset_of(4)]
    overwrite(folder / segment_name(0), LAYOUT.offset_of(1), record)
    overwrite(folder / segment_name(1), LAYOUT.offset_of(1), first[LAYOUT.offset_of(1) : LAYOUT.offset_of(2)])
    assert names_found(tmp_path) == [0, 2, 3, 4, 5, 7]


def test_blocks_in_another_place(tmp_path: Path) -> None:
    """A block that lies where another should be is corrupt."""
    folder = filled(tmp_path)
    first = (folder / segment_name(0)).read_bytes()
    block = first[LAYOUT.offset_of(3) : LAYOUT.page_of(3)]
    overwrite(folder / segment_name(1), LAYOUT.offset_of(1), block)
    assert names_found(tmp_path) == [0, 1, 2, 3, 4, 5, "corrupt", 7]


def test_copied_and_renamed_segments(tmp_path: Path) -> None:
    """A segment under another name than its own is not used."""
    folder = filled(tmp_path)
    shutil.copy(folder / segment_name(0), folder / segment_name(7))
    (folder / segment_name(1)).rename(folder / segment_name(9))
    assert names_found(tmp_path) == list(range(5))


@pytest.mark.parametrize("field", ["version", "block_bytes", "numerics", "sequence"])
def test_segments_of_others(tmp_path: Path, field: str) -> None:
    """Segments of another version, size of blocks or numerics are deleted, not read."""
    folder = filled(tmp_path)
    page = bytearray(PAGE_BYTES)
    sequence = MAX_SEQUENCE if field == "sequence" else 1
    content = SegmentPage(
        sequence,
        BLOCK_BYTES + (field == "block_bytes"),
        NUMERICS[::-1] if field == "numerics" else NUMERICS,
    )
    write_segment_page(memoryview(page), content)
    if field == "version":
        page[len(MAGIC)] = VERSION + 1
        seal(page)
    overwrite(folder / segment_name(1), 0, page)
    if field == "sequence":
        (folder / segment_name(1)).rename(folder / segment_name(sequence))
    assert names_found(tmp_path) == list(range(5))
    assert [file.name for file in folder.glob("segment-*")] == [segment_name(0)]


def seal(page: bytearray) -> None:
    """Give a page the checksum of its contents."""
    page[-4:] = zlib.crc32(page[:-4]).to_bytes(4, "little")


def test_pages_with_any_contents(tmp_path: Path) -> None:
    """Pages with a right checksum and any contents are read without an error, and their records are not used."""
    draw = random.Random(0)
    for _ in range(200):
        page = bytearray(draw.randbytes(PAGE_BYTES))
        page[: len(MAGIC)] = draw.choice([MAGIC, b"quipukvR"])
        page[len(MAGIC) : len(MAGIC) + 4] = VERSION.to_bytes(4, "little")
        seal(page)
        read_segment_page(memoryview(page))
        assert read_record_page(memoryview(page), 3, 2) is None
    folder = filled(tmp_path)
    for number in range(2, 40):
        page[:8] = MAGIC
        page[20:] = draw.randbytes(PAGE_BYTES - 20)
        seal(page)
        (folder / segment_name(number)).write_bytes(page * 4)
    assert names_found(tmp_path) == list(range(8))


@pytest.mark.parametrize("field", ["key", "num_tokens", "numerics", "checksum"])
def test_headers_of_others(tmp_path: Path, field: str) -> None:
    """A record whose page names other contents than its block has is never read as what it is not."""
    folder = filled(tmp_path)
    values = {"key": bytes([9]) * 32, "num_tokens": 15, "numerics": "other", "checksum": 5}
    page = bytearray(PAGE_BYTES)
    write_record_page(memoryview(page), attrs.evolve(header_of(6), **{field: values[field]}), 1, 1)
    overwrite(folder / segment_name(1), LAYOUT.page_of(1), page)
    store = open_store(tmp_path, num_blocks=NUM_BLOCKS)
    memory = memoryview(bytearray(BLOCK_BYTES))
    (header,) = store.read([6], [b""], memory)
    if field == "numerics":
        assert [stored.slot for stored in store.stored] == [0, 1, 2, 3, 4, 5, 7]
        assert header is None
    else:
        assert header is not None and header != header_of(6) and getattr(header, field) == values[field]
    store.close()
