"""Which folder an engine's disk tier takes, and what it leaves alone there."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quipu.actors.engine.mover import disk_folder
from quipu.actors.engine.mover.disk_folder import LOCK_NAME
from quipu.actors.engine.mover.disk_segments import segment_name
from quipu.actors.engine.mover.disk_store import DiskStore

from .disk_bench import BLOCK_BYTES, open_store, read, write

OTHER = "f" * 32

HOLD = """
import sys
from pathlib import Path
from quipu.actors.engine.mover.disk_store import DiskStore

path, num_bytes, block_bytes, numerics = sys.argv[1:]
store = DiskStore(Path(path), num_bytes=int(num_bytes), block_bytes=int(block_bytes), numerics=numerics)
print(store.folder.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(path: Path, numerics: str = OTHER) -> Iterator[subprocess.Popen[str]]:
    """Have another process open a store below `path`."""
    arguments = [sys.executable, "-c", HOLD, str(path), "1000000", str(BLOCK_BYTES), numerics]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def folder_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0]
    return process.stdout.readline().strip()


def names_found(store: DiskStore) -> set[int]:
    return {int.from_bytes(stored.key, "big") for stored in store.stored}


def test_each_engine_has_its_own(tmp_path: Path) -> None:
    """Engines that run together, in this process or another, have folders of their own; one that is killed leaves
    its folder to the next."""
    first = open_store(tmp_path)
    with held_by_another(tmp_path) as other:
        assert [first.folder.name, folder_of(other)] == ["engine-0", "engine-1"]
        third = open_store(tmp_path)
        assert third.folder.name == "engine-2"
        other.send_signal(signal.SIGKILL)
        other.wait()
        fourth = open_store(tmp_path)
        assert fourth.folder.name == "engine-1"
    first.close()
    again = open_store(tmp_path)
    assert again.folder.name == "engine-0"
    for store in (again, third, fourth):
        store.close()


def test_folder_with_the_same_numerics(tmp_path: Path) -> None:
    """An engine takes a free folder with blocks that it can use; otherwise the first free one, where it discards the
    blocks of others once."""
    stores = [open_store(tmp_path, numerics=numerics) for numerics in ("a", "b", "c")]
    for name, store in enumerate(stores):
        write(store, range(3), range(10 * name, 10 * name + 3), numerics="abc"[name])
        store.close()
    for numerics in ("c", "b", "a"):
        store = open_store(tmp_path, numerics=numerics)
        assert store.folder.name == f"engine-{'abc'.index(numerics)}" and len(store.stored) == 3
        assert store.discarded.num_segments == 0
        store.close()
    store = open_store(tmp_path, numerics="d")
    assert store.folder.name == "engine-0" and store.stored == []
    assert store.discarded.num_segments == 2 and store.discarded.num_bytes == 2 * 4096 + 3 * 12288
    assert [file.name for file in store.folder.iterdir()] == [LOCK_NAME]
    write(store, [0], [1], numerics="d")
    store.close()
    store = open_store(tmp_path, numerics="d")
    assert store.discarded.num_segments == 0 and len(store.stored) == 1
    store.close()


def test_preferred_folder_is_in_use(tmp_path: Path) -> None:
    """An engine never takes a folder that another uses, although its blocks would be right."""
    first = open_store(tmp_path)
    write(first, [0], [1])
    second = open_store(tmp_path)
    assert second.folder.name == "engine-1" and second.stored == []
    assert read(first, [0]) == [1]
    first.close()
    second.close()


def test_engines_that_start_together(tmp_path: Path) -> None:
    """Engines that start at the same time each find a folder with blocks of theirs."""
    stores = [open_store(tmp_path) for _ in range(4)]
    for name, store in enumerate(stores):
        write(store, [0], [name])
    for _ in range(5):
        while stores:
            stores.pop().close()
        threads = [threading.Thread(target=lambda: stores.append(open_store(tmp_path))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for store in stores for name in names_found(store)) == [0, 1, 2, 3]
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "foreign", "locked pipe", "lock link"])
def test_names_that_are_taken(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has the name of an engine's folder and is none of ours is passed over, and stays as it is."""
    taken, target = tmp_path / "engine-0", tmp_path / "target"
    target.mkdir(mode=0o755)
    (target / segment_name(3)).write_bytes(b"precious")
    match kind:
        case "link":
            taken.symlink_to(target)
        case "dangling":
            taken.symlink_to(tmp_path / "lost")
        case "file":
            taken.write_bytes(b"precious")
        case "foreign":
            taken.mkdir()
            user = os.geteuid()
            monkeypatch.setattr("os.geteuid", lambda: user + 1 if not (tmp_path / "engine-1").exists() else user)
        case "locked pipe":
            taken.mkdir()
            os.mkfifo(taken / LOCK_NAME)
        case "lock link":
            taken.mkdir()
            (taken / LOCK_NAME).symlink_to(target / segment_name(3))
    before = taken.lstat()
    store = open_store(tmp_path)
    assert store.folder.name == "engine-1"
    write(store, [0], [1])
    store.close()
    assert taken.lstat().st_ino == before.st_ino and taken.lstat().st_mtime_ns == before.st_mtime_ns
    assert [file.read_bytes() for file in target.iterdir()] == [b"precious"]
    assert not (tmp_path / "lost").exists()


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    """Other names in the path's folder, and numbers in other forms, are left alone."""
    names = ["engine-", "engine-01", "engine-x", "engine--1", "engine-0.old", "Engine-0", "engine-0\n", "engine-\u0661"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / segment_name(0)).write_bytes(b"precious")
    store = open_store(tmp_path)
    assert store.folder.name == "engine-0"
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "engine-0", LOCK_NAME}


def test_foreign_files_beside_segments(tmp_path: Path) -> None:
    """Links, files with other contents or names, folders and pipes in an engine's folder are neither followed, read as
    blocks nor deleted; the store works beside them."""
    store = open_store(tmp_path)
    write(store, range(4), range(4))
    store.close()
    folder, outside = store.folder, tmp_path / "outside"
    outside.mkdir()
    segment = (folder / segment_name(0)).read_bytes()
    (outside / "segment").write_bytes(segment)
    (outside / "linked").write_bytes(segment)
    (folder / segment_name(2)).symlink_to(outside / "segment")
    (folder / segment_name(3)).hardlink_to(outside / "linked")
    (folder / segment_name(4)).mkdir()
    os.mkfifo(folder / segment_name(5))
    (folder / segment_name(6)).write_bytes(b"precious" * 10_000)
    (folder / segment_name(7)).write_bytes(b"precious")
    for name in ("segment-7", "segment-x", segment_name(8) + ".old", segment_name(9).upper(), "notes.txt"):
        (folder / name).write_bytes(segment)
    before = {path: (path.lstat().st_ino, path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.iterdir()}
    store = open_store(tmp_path)
    assert names_found(store) == {0, 1, 2, 3}
    for first in range(4, 40, 2):
        write(store, [first, first + 1], [first, first + 1])
    assert read(store, range(8)) == list(range(8))
    store.close()
    for path, state in before.items():
        assert (path.lstat().st_ino, path.lstat().st_mtime_ns, path.lstat().st_size) == state, path
    assert (outside / "segment").read_bytes() == (outside / "linked").read_bytes() == segment


def test_folder_with_wide_permissions(tmp_path: Path) -> None:
    """A folder of ours that others may enter is closed to them."""
    (tmp_path / "engine-0").mkdir(mode=0o755)
    store = open_store(tmp_path)
    assert store.folder.name == "engine-0" and store.folder.stat().st_mode & 0o777 == 0o700
    store.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("file", "Not a directory"),
        ("below a file", "Not a directory"),
        ("cannot be created", "No such file"),
        ("dangling", "No such file"),
        ("lock is a link", "symbolic"),
        ("lock is a pipe", "not a regular file"),
        ("read-only", "Read-only file system"),
        ("not writable", "Permission denied"),
    ],
)
def test_paths_that_cannot_be_used(tmp_path: Path, kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that cannot be used is an error that names the flag, the path and the reason."""
    path = tmp_path / "path"
    match kind:
        case "file":
            path.write_bytes(b"")
        case "below a file":
            path.write_bytes(b"")
            path /= "below"
        case "cannot be created":
            path = Path("/proc/self/quipu")
        case "dangling":
            path.symlink_to(tmp_path / "lost")
        case "lock is a link":
            path.mkdir()
            (path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
        case "lock is a pipe":
            path.mkdir()
            os.mkfifo(path / LOCK_NAME)
        case "read-only" | "not writable":
            path.mkdir()
            error = OSError(30, "Read-only file system") if kind == "read-only" else OSError(13, "Permission denied")
            os_open = os.open

            def refuse(name: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
                if flags & os.O_CREAT:
                    raise error
                return os_open(name, flags, mode, dir_fd=dir_fd)

            monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ValueError, match=f"--kv-disk {path} cannot be used: .*{said}"):
        open_store(path)
    assert not (tmp_path / "elsewhere").exists()


def test_choice_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process is choosing for half a minute, the path is reported as unusable instead of waiting on."""
    monkeypatch.setattr(disk_folder, "CHOICE_TIMEOUT_S", 0.05)
    open_store(tmp_path).close()
    descriptor = os.open(tmp_path / LOCK_NAME, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process holds its file lock"):
        open_store(tmp_path)
    os.close(descriptor)
    open_store(tmp_path).close()


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """A store that was closed, or could not be opened, leaves no descriptor open."""
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        store = open_store(tmp_path)
        for first in range(0, 200, 8):
            write(store, [slot % store.num_slots for slot in range(first, first + 8)], range(first, first + 8))
        with pytest.raises(ValueError, match="holds no two blocks"):
            DiskStore(tmp_path, num_bytes=1, block_bytes=1, numerics="")
        store.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
