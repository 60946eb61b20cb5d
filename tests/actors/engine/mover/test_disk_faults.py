"""Disks that fail, fill up, are slow, or return something else: every failure is an OSError, and the store goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from quipu.actors.engine.mover.disk_io import PAGE_BYTES

from .disk_bench import BLOCK_BYTES, FaultyDisk, open_store, read, write

ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)
RECORD_BYTES = BLOCK_BYTES + PAGE_BYTES


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file system that knows no O_DIRECT, which creates a file before it says so."""
    os_open = os.open

    def refuse(name: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = os_open(name, flags, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return descriptor

    monkeypatch.setattr("os.open", refuse)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("first", [3, 4], ids=["appended", "new segment"])
def test_every_write_fails(tmp_path: Path, disk: FaultyDisk, error: int, first: int) -> None:
    """A write that fails is an OSError with the disk's reason; its slots hold nothing, and when the disk works again,
    they can be written."""
    store = open_store(tmp_path, calls=disk)
    write(store, range(first), range(first))
    disk.write_error = error
    for _ in range(3):
        with pytest.raises(OSError, match=os.strerror(error)) as raised:
            write(store, [first, first + 1], [50, 51])
        assert raised.value.errno == error
    assert read(store, range(6)) == [*range(first), *[None] * (6 - first)]
    disk.write_error = 0
    write(store, [first, first + 1], [60, 61])
    assert read(store, range(first + 2)) == [*range(first), 60, 61]
    store.close()
    store = open_store(tmp_path)
    assert [name for stored in store.stored for name in read(store, [stored.slot])] == [*range(first), 60, 61]
    store.close()


@pytest.mark.parametrize("error", ERRORS)
def test_every_read_fails(tmp_path: Path, disk: FaultyDisk, error: int) -> None:
    """A read that fails is an OSError with the disk's reason; when the disk works again, the blocks are there."""
    store = open_store(tmp_path, calls=disk)
    write(store, range(3), range(3))
    disk.read_error = error
    with pytest.raises(OSError, match=os.strerror(error)):
        read(store, [0])
    write(store, [3], [3])
    disk.read_error = 0
    assert read(store, range(4)) == list(range(4))
    store.close()


def test_scan_that_cannot_read(tmp_path: Path, disk: FaultyDisk) -> None:
    """On a disk that cannot be read at the start nothing is found and nothing is lost; the store works."""
    store = open_store(tmp_path)
    write(store, range(3), range(3))
    store.close()
    disk.read_error = errno.EIO
    store = open_store(tmp_path, calls=disk)
    assert store.stored == []
    store.close()
    disk.read_error = 0
    store = open_store(tmp_path, calls=disk)
    assert len(store.stored) == 3
    store.close()


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """However little room is left when a write begins, its slots hold nothing, what was written before is there, and
    the space of what was begun is given back."""
    for room in range(0, 4 * RECORD_BYTES + 2 * PAGE_BYTES, PAGE_BYTES // 2):
        disk = FaultyDisk()
        store = open_store(tmp_path / str(room), calls=disk)
        write(store, range(3), range(3))
        before = sum(file.stat().st_size for file in store.folder.iterdir())
        disk.free_bytes = room
        with pytest.raises(OSError, match="No space left"):
            write(store, range(3, 8), range(3, 8))
        assert read(store, range(8)) == [0, 1, 2, *[None] * 5]
        assert sum(file.stat().st_size for file in store.folder.iterdir()) <= before + 2 * PAGE_BYTES
        disk.free_bytes = None
        write(store, [3, 4], [13, 14])
        store.close()
        store = open_store(tmp_path / str(room))
        assert [name for stored in store.stored for name in read(store, [stored.slot])] == [0, 1, 2, 13, 14]
        store.close()


@pytest.mark.parametrize(
    ("direct", "most_bytes"),
    # the kernel refuses O_DIRECT for parts of a page
    [(True, PAGE_BYTES), (True, 3 * PAGE_BYTES), (False, PAGE_BYTES), (False, 5000), (False, 20_000), (False, 999)],
)
def test_short_calls(
    tmp_path: Path, disk: FaultyDisk, *, direct: bool, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that read or write less than they were to are continued."""
    if not direct:
        refuse_direct(monkeypatch)
    disk.most_bytes = most_bytes
    store = open_store(tmp_path, calls=disk)
    write(store, range(7), range(7))
    assert read(store, range(8)) == [*range(7), None]
    store.close()
    store = open_store(tmp_path, calls=disk)
    assert read(store, [stored.slot for stored in store.stored]) == list(range(7))
    store.close()


def test_calls_that_move_nothing(tmp_path: Path, disk: FaultyDisk) -> None:
    """A disk that takes no bytes and gives no reason is an error, not an endless loop; one that returns none has no
    blocks."""
    store = open_store(tmp_path, calls=disk)
    write(store, [0], [0])
    disk.most_bytes = 0
    with pytest.raises(OSError, match="accepted no whole page"):
        write(store, [1], [1])
    assert read(store, [0, 1]) == [None, None]
    disk.most_bytes = None
    assert read(store, [0, 1]) == [0, None]
    store.close()


class NoDirect(FaultyDisk):
    """A file system that accepts O_DIRECT when a file is opened, and refuses it when it is used."""

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(descriptor)
        return super().read(descriptor, buffers, offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(descriptor)
        return super().write(descriptor, buffers, offset)

    def _check(self, descriptor: int) -> None:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        if int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("when", ["open", "use"])
def test_file_system_without_direct_access(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT is refused, files are written and read by way of the page cache."""
    if when == "open":
        refuse_direct(monkeypatch)
    calls = NoDirect() if when == "use" else None
    for _ in range(2):
        store = open_store(tmp_path, calls=calls)
        if not store.stored:
            write(store, range(7), range(7))
        assert read(store, range(8)) == [*range(7), None]
        store.close()
    assert len([*store.folder.glob("segment-*")]) == 4


def test_bytes_of_another_block(tmp_path: Path, disk: FaultyDisk) -> None:
    """Bytes from another place on the disk are never returned as the block."""
    store = open_store(tmp_path, calls=disk, num_blocks=640)
    write(store, range(8), range(8))
    for shift in (PAGE_BYTES, 2 * PAGE_BYTES, RECORD_BYTES, 5 * RECORD_BYTES, -RECORD_BYTES):
        disk.shift = shift
        assert read(store, [2]) == ["corrupt"]
    disk.shift = 10 * RECORD_BYTES
    assert read(store, [2]) == [None]
    store.close()


def test_flipped_bits(tmp_path: Path, disk: FaultyDisk) -> None:
    """A flipped bit in a block or in its page is noticed."""
    store = open_store(tmp_path, calls=disk)
    write(store, [0], [0])
    for bit in (*range(0, 8 * RECORD_BYTES, 997), 0, 8 * BLOCK_BYTES - 1, 8 * BLOCK_BYTES, 8 * RECORD_BYTES - 1):
        disk.flipped_bit = bit
        assert read(store, [0]) == ["corrupt"]
    disk.flipped_bit = None
    assert read(store, [0]) == [0]
    store.close()


def test_late_read(tmp_path: Path, disk: FaultyDisk) -> None:
    """While a read hangs, others and writes go on; the segment that it reads may be begun anew meanwhile, after which
    it returns the old block or nothing."""
    store = open_store(tmp_path, calls=disk)
    write(store, range(4), range(4))
    hanging, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        disk.before_read = bool
        hanging.set()
        assert go_on.wait(60)

    disk.before_read = hang
    late: list[object] = []
    reader = threading.Thread(target=lambda: late.extend(read(store, [0, 1])))
    reader.start()
    assert hanging.wait(60)
    assert read(store, [0, 1, 2]) == [0, 1, 2]
    write(store, [0, 1], [10, 11])
    assert read(store, [0, 1, 2]) == [10, 11, 2]
    before = len([*Path("/proc/self/fd").iterdir()])
    go_on.set()
    reader.join()
    assert late == [None, None]
    assert len([*Path("/proc/self/fd").iterdir()]) == before - 1
    store.close()


def test_slow_reads_beside_each_other(tmp_path: Path, disk: FaultyDisk) -> None:
    """Reads of several threads are in progress at the same time."""
    store = open_store(tmp_path, calls=disk)
    write(store, range(8), range(8))
    together = threading.Barrier(8)
    disk.before_read = lambda: together.wait(60)
    found: list[object] = []
    readers = [threading.Thread(target=lambda at=at: found.extend(read(store, [at]))) for at in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sorted(map(str, found)) == [*"01234567"]
    store.close()


def test_slow_disk(tmp_path: Path, disk: FaultyDisk) -> None:
    """A slow disk returns what it holds."""
    store = open_store(tmp_path, calls=disk)
    write(store, [0], [0])
    disk.delay_s = 0.05
    began_s = time.monotonic()
    assert read(store, [0]) == [0]
    assert time.monotonic() - began_s >= 0.05
    store.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.actors.engine.mover.disk_bench import open_store, read, write

store = open_store(Path(sys.argv[1]), num_blocks=640)
write(store, [0, 1], [0, 1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 3 * 12288 + 4096, resource.RLIM_INFINITY))
write(store, [2], [2])
try:
    write(store, [3, 4], [3, 4])
except OSError as error:
    print(error.errno, read(store, range(5)))
store.close()
"""


def test_limit_of_the_kernel(tmp_path: Path) -> None:
    """A write that the kernel cuts short because of a limit is an error, and what was written before stays."""
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == f"{errno.EFBIG} [0, 1, 2, None, None]\n"
    store = open_store(tmp_path, num_blocks=640)
    assert [stored.slot for stored in store.stored] == [0, 1, 2]
    assert store.blank == range(3, 10)
    store.close()


def test_segment_that_cannot_be_removed(tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a segment that is to be begun anew cannot be removed, the write fails, and files do not grow; it succeeds
    once that is possible."""
    store = open_store(tmp_path, calls=disk)
    write(store, range(8), range(8))
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.unlink", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="Read-only"):
            write(store, [0], [10])
    assert len([*store.folder.glob("segment-*")]) == 4
    assert read(store, range(4)) == [None, None, 2, 3]
    monkeypatch.setattr("os.unlink", unlink)
    write(store, [0], [10])
    assert read(store, range(4)) == [10, None, 2, 3]
    assert len([*store.folder.glob("segment-*")]) == 4
    store.close()


def test_clearing_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a segment cannot be removed, that is an error; the others are, and no block is found later."""
    store = open_store(tmp_path)
    write(store, range(8), range(8))
    unlink = os.unlink
    kept = sorted(store.folder.glob("segment-*"))[1].name

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if name == kept:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("os.unlink", refuse)
    with pytest.raises(OSError, match="Input/output"):
        store.clear()
    assert [file.name for file in store.folder.glob("segment-*")] == [kept]
    assert read(store, range(8)) == [None] * 8
    store.close()
    monkeypatch.setattr("os.unlink", unlink)
    store = open_store(tmp_path)
    assert store.stored == []
    store.close()


def test_folder_that_was_deleted(tmp_path: Path) -> None:
    """If somebody deletes the files while the store is open, its blocks can be read until their segment is begun anew;
    if its folder is deleted, too, new segments cannot be begun."""
    store = open_store(tmp_path)
    write(store, range(4), range(4))
    for file in store.folder.iterdir():
        file.unlink()
    assert read(store, range(4)) == list(range(4))
    write(store, [0], [10])
    assert read(store, range(4)) == [10, None, 2, 3]
    for file in store.folder.iterdir():
        file.unlink()
    store.folder.rmdir()
    with pytest.raises(FileNotFoundError):
        write(store, [2], [12])
    assert read(store, [0, 2, 3]) == [10, None, None]
    store.close()


def test_no_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no memory to borrow, that is an OSError, too."""
    store = open_store(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refuse)
        memory = memoryview(bytearray(BLOCK_BYTES))
        with pytest.raises(OSError, match="memory"):
            store.read([0], [b""], memory)
    write(store, [0], [0])
    assert read(store, [0]) == [0]
    store.close()
