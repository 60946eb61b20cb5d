"""Blocks on disk: what is written is read, and what was written by earlier processes is found again."""

from __future__ import annotations

import os
import random
import stat
import threading
from pathlib import Path

import pytest

from quipu.actors.engine.mover.block_header import BlockHeader
from quipu.actors.engine.mover.disk_records import DiskLayout
from quipu.actors.engine.mover.disk_store import StoredSlot

from .disk_bench import BLOCK_BYTES, BLOCKS, block_of, bytes_for, header_of, key_of, open_store, pages, read, write


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_there_and_back(tmp_path: Path) -> None:
    """Blocks are read as they were written, in any order and by runs that cross segments; other slots hold nothing."""
    store = open_store(tmp_path)
    assert store.num_slots == BLOCKS and store.stored == []
    write(store, range(3), [100, 101, 102])
    write(store, range(3, 11), range(103, 111))
    assert read(store, [7, 8, 9, 2, 11, 0, 127]) == [107, 108, 109, 102, None, 100, None]
    store.close()


@pytest.mark.parametrize("block_bytes", [1, 512, 4095, 4096, 4097, 3 * 4096, 1835008])
@pytest.mark.parametrize("offset", [0, 8])
def test_any_size_and_place_in_memory(tmp_path: Path, block_bytes: int, offset: int) -> None:
    """Blocks of any size are stored from and loaded into any memory, and found again."""
    store = open_store(tmp_path, num_blocks=4, block_bytes=block_bytes)
    source = pages(3 * block_bytes + offset)[offset:]
    source[:] = b"".join(block_of(name, block_bytes) for name in range(3))
    store.write(range(3), [header_of(name, block_bytes) for name in range(3)], source)
    for _ in range(2):
        target = pages(3 * block_bytes + offset)[offset:]
        assert store.read(range(3), [b""] * 3, target) == [header_of(name, block_bytes) for name in range(3)]
        assert target == source
        store.close()
        store = open_store(tmp_path, num_blocks=4, block_bytes=block_bytes)
    store.close()


def test_restart(tmp_path: Path) -> None:
    """A later process finds all blocks, oldest first, and continues in the slots after the last."""
    store = open_store(tmp_path)
    write(store, range(4), range(4))
    write(store, [4], [4])
    store.close()
    store = open_store(tmp_path)
    assert store.stored == [StoredSlot(slot, key_of(slot)) for slot in range(5)]
    assert store.blank == range(5, 6)
    write(store, [5, 6], [5, 6])
    assert read(store, range(8)) == [0, 1, 2, 3, 4, 5, 6, None]
    store.close()
    store = open_store(tmp_path)
    assert read(store, [stored.slot for stored in store.stored]) == list(range(7))
    store.close()


def test_segment_begun_anew(tmp_path: Path) -> None:
    """Writing the first slot of a segment drops what it held; after a restart, its new blocks are the newest."""
    store = open_store(tmp_path)
    for first in range(0, BLOCKS, 4):
        write(store, range(first, first + 4), range(first, first + 4))
    write(store, [2], [500])
    assert read(store, range(6)) == [0, 1, 500, None, 4, 5]
    store.close()
    store = open_store(tmp_path)
    names = [int.from_bytes(stored.key, "big") for stored in store.stored]
    assert names == [0, 1, *range(4, BLOCKS), 500]
    last = store.stored[-1].slot
    assert store.blank == range(last + 1, last + 2)
    assert [name for stored in store.stored for name in read(store, [stored.slot])] == names
    store.close()


def test_clear(tmp_path: Path) -> None:
    """What is cleared is found neither in this process nor later; what is written afterwards is."""
    store = open_store(tmp_path)
    write(store, range(7), range(7))
    store.clear()
    assert read(store, range(7)) == [None] * 7
    assert not [*store.folder.glob("segment-*")]
    write(store, [6, 7], [16, 17])
    assert read(store, range(5, 8)) == [None, 16, 17]
    store.close()
    store = open_store(tmp_path)
    assert store.stored == [StoredSlot(0, key_of(16)), StoredSlot(1, key_of(17))]
    store.clear()
    store.close()
    store = open_store(tmp_path)
    assert store.stored == [] and not store.blank
    store.close()


def test_slots_that_are_passed_over(tmp_path: Path) -> None:
    """A slot that is not written, because its block was evicted first, holds nothing, also after a restart."""
    store = open_store(tmp_path, num_blocks=640)  # 10 in a segment
    write(store, [0, 2, 3], [0, 2, 3])
    write(store, [7], [7])
    assert read(store, range(10)) == [0, None, 2, 3, None, None, None, 7, None, None]
    store.close()
    store = open_store(tmp_path, num_blocks=640)
    assert [stored.slot for stored in store.stored] == [0, 2, 3, 7] and store.blank == range(8, 10)
    assert read(store, range(10)) == [0, None, 2, 3, None, None, None, 7, None, None]
    store.close()


def test_first_slot_of_a_segment_passed_over(tmp_path: Path) -> None:
    """A segment that is begun anew at its second slot keeps nothing of what it held."""
    store = open_store(tmp_path)
    write(store, [0, 1, 2, 3], [0, 1, 2, 3])
    write(store, [1], [11])
    assert read(store, range(4)) == [None, 11, 2, 3]
    store.close()


def test_key_in_two_segments(tmp_path: Path) -> None:
    """Of two blocks with the same key, the newest is found after a restart."""
    store = open_store(tmp_path)
    write(store, [0, 1, 2], [7, 1, 7])
    store.close()
    store = open_store(tmp_path)
    assert store.stored == [StoredSlot(1, key_of(1)), StoredSlot(2, key_of(7))]
    store.close()


def test_size_of_files(tmp_path: Path) -> None:
    """Files never have more than the given size together, at any moment of many rounds."""
    num_bytes = 100_000
    layout = DiskLayout.of(num_bytes, BLOCK_BYTES)
    store = open_store(tmp_path, num_blocks=8)
    most = bytes_for(8)
    for round_ in range(5):
        for slot in range(8):
            write(store, [slot], [100 * round_ + slot])
            assert size_of(tmp_path) <= most
    store.close()
    assert layout.num_segments * layout.segment_bytes <= num_bytes


def test_layouts() -> None:
    """At least two and at most 64 segments use any size but for less than one of them."""
    draw = random.Random(0)
    for _ in range(2000):
        block_bytes = draw.choice([1, 4096, 5000, 1 << 20])
        num_bytes = draw.randrange(2 * (block_bytes + 12288), 400 * (block_bytes + 12288))
        layout = DiskLayout.of(num_bytes, block_bytes)
        used = layout.num_segments * layout.segment_bytes
        assert 2 <= layout.num_segments <= 64
        assert used <= num_bytes < used + layout.segment_bytes


@pytest.mark.parametrize("num_bytes", [0, 4096, 2 * (8192 + 4096 + 4096) - 1])
def test_too_small(num_bytes: int) -> None:
    """A size that holds no two blocks is refused, with what is needed."""
    with pytest.raises(ValueError, match=r"--kv-disk-size of .* at least 32768 are needed"):
        DiskLayout.of(num_bytes, BLOCK_BYTES)


@pytest.mark.parametrize("num_blocks", [2, 5, 9, 40])
def test_another_size(tmp_path: Path, num_blocks: int) -> None:
    """After a change of the size, the newest blocks that there is room for are found; files have the new size."""
    store = open_store(tmp_path, num_blocks=200)
    for slot in range(0, 200, 8):
        write(store, range(slot, slot + 8), range(slot, slot + 8))
    store.close()
    store = open_store(tmp_path, num_blocks=num_blocks)
    names = read(store, [stored.slot for stored in store.stored][:8])
    assert names and all(isinstance(name, int) and name >= 200 - 8 * num_blocks for name in names)
    assert size_of(tmp_path) <= bytes_for(num_blocks)
    slots = [stored.slot for stored in store.stored]
    assert len({*slots}) == len(slots) and max(slots) < store.num_slots
    store.close()


def test_permissions(tmp_path: Path) -> None:
    """Only the user can read files and folders, whatever the umask."""
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "new")
        write(store, [0, 1, 2], [0, 1, 2])
    finally:
        os.umask(before)
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    store.close()


def test_reads_beside_a_writer(tmp_path: Path) -> None:
    """While segments are begun anew, readers get a whole block, whichever was in the slot, or nothing."""
    store = open_store(tmp_path, num_blocks=8)
    over = threading.Event()
    wrong: list[object] = []
    num_read = [0] * 3

    def keep_reading(index: int) -> None:
        draw = random.Random(index)
        try:
            while not over.is_set():
                slot = draw.randrange(7)
                for at, name in enumerate(read(store, [slot, slot + 1])):
                    num_read[index] += name is not None
                    if name is not None and (name == "corrupt" or name % 8 != slot + at):
                        wrong.append(name)
        except Exception as error:
            wrong.append(error)

    readers = [threading.Thread(target=keep_reading, args=(index,)) for index in range(3)]
    for reader in readers:
        reader.start()
    round_ = 0
    while min(num_read) < 30 and not wrong:
        round_ += 1
        for slot in range(8):
            write(store, [slot], [8 * round_ + slot])
    over.set()
    for reader in readers:
        reader.join()
    assert not wrong
    store.close()


def test_header_that_is_too_long(tmp_path: Path) -> None:
    """A key for which a page has no room is refused, and nothing is written."""
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="65 bytes"):
        store.write([0], [BlockHeader(bytes(65), 16, "n", 0)], pages(BLOCK_BYTES))
    assert read(store, [0]) == [None]
    store.close()
