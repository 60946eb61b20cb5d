"""Fetching a checkpoint: bit-identical or an error, whatever the source, the disk and other processes do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.fleet.cluster import manifest as manifest_module
from quipu.actors.fleet.cluster import partial_copy
from quipu.actors.fleet.cluster.manifest import Manifest, make_manifest
from quipu.actors.fleet.cluster.served_files import CONFIG, INDEX, SINGLE
from quipu.actors.fleet.cluster.shipping import (
    MAX_TRIES,
    PARTIAL_SUFFIX,
    PIECES_IN_FLIGHT,
    PieceSource,
    fetch_checkpoint,
)
from quipu.actors.shared.checkpoint import CheckpointError
from tests.actors.fleet.cluster.folders import (
    PIECE_BYTES,
    DialledPieces,
    SourceLost,
    contents_of,
    make_folder,
    make_index,
    num_pieces_of,
    silent,
)
from tests.processes import eventually


def fetch(source: PieceSource, cache: Path, **options: Any) -> Path:
    return fetch_checkpoint(source, source.manifest(), cache, silent, **{"is_right": lambda _: True, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "checkpoint")


@pytest.fixture
def source(folder: Path) -> DialledPieces:
    return DialledPieces(folder)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def test_folder_arrives(source: DialledPieces, folder: Path, cache: Path) -> None:
    """Every piece is asked for once; the folder is named by the total digest, and only a lock is left beside it."""
    said: list[str] = []
    manifest = source.manifest()
    arrived = fetch_checkpoint(source, manifest, cache, said.append, is_right=lambda _: False)
    assert contents_of(arrived) == contents_of(folder)
    assert len(source.asked) == len(set(source.asked)) == num_pieces_of(manifest)
    assert {path.name for path in cache.iterdir()} == {manifest.digest, f"{manifest.digest}.lock"}
    assert said[0] == f"fetching {manifest.num_bytes} bytes of the checkpoint in {num_pieces_of(manifest)} pieces"
    assert re.match(rf"fetched {manifest.num_bytes} bytes in [\d.]+ s", said[-1])


@given(
    files=st.dictionaries(st.sampled_from(["tokenizer.json", "chat_template.jinja"]), st.binary(max_size=300)),
    shards=st.lists(st.binary(max_size=700), max_size=3),
    piece_bytes=st.integers(1, 400),
)
def test_any_folder_arrives(files: dict[str, bytes], shards: list[bytes], piece_bytes: int) -> None:
    """Whatever the files' sizes and contents and the size of pieces, the folder arrives bit-identical."""
    names = [f"model-{number}.safetensors" for number in range(len(shards))]
    files |= {CONFIG: b"{}", **dict(zip(names, shards, strict=True))}
    if shards:
        files[INDEX] = make_index(names)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_folder(Path(temporary) / "checkpoint", files)
        arrived = fetch(DialledPieces(folder, piece_bytes=piece_bytes), Path(temporary) / "cache")
        assert contents_of(arrived) == files


def flip(data: memoryview) -> memoryview:
    data[len(data) // 2] ^= 1
    return data


SPOILED: dict[str, Callable[[memoryview], memoryview]] = {
    "a flipped bit": flip,
    "cut": lambda data: data[:-1],
    "longer": lambda data: memoryview(bytes(data) + b"x"),
    "empty": lambda data: data[:0],
}
FAULTS = {
    "a flipped bit": "with other contents than their digest says",
    "cut": r"with \d+ bytes instead of \d+",
    "longer": r"with \d+ bytes instead of \d+",
    "empty": r"with 0 bytes instead of \d+",
}
"""What the error says about each."""


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_wrong_piece_is_asked_for_again(source: DialledPieces, folder: Path, cache: Path, spoil: Any) -> None:
    """Pieces that arrive wrong, up to a bound, do not reach the folder: they are asked for again."""
    source.spoil, source.num_spoiled = spoil, MAX_TRIES - 1
    arrived = fetch(source, cache)
    assert contents_of(arrived) == contents_of(folder)
    assert len(source.asked) == num_pieces_of(source.manifest()) + MAX_TRIES - 1


@pytest.mark.parametrize("fault", SPOILED)
def test_piece_that_is_always_wrong(source: DialledPieces, cache: Path, fault: str) -> None:
    """A piece that keeps arriving wrong is an error that names the file, and leaves no complete folder."""
    source.spoil, source.num_spoiled = SPOILED[fault], 1_000_000
    with pytest.raises(CheckpointError, match=rf"bytes \d+ to \d+ of [\w.]+ arrived {FAULTS[fault]}, 4 times"):
        fetch(source, cache)
    assert max(source.asked.count(piece) for piece in source.asked) == MAX_TRIES
    assert not (cache / source.manifest().digest).exists()


def test_source_that_cannot_read_for_a_while(source: DialledPieces, folder: Path, cache: Path) -> None:
    """A piece is asked for again after an OSError of the source, but not after a CheckpointError."""
    failures = [OSError("lost on its way")] * (MAX_TRIES - 1)

    class Unsteady:
        manifest = source.manifest

        def read(self, file: str, piece: int) -> memoryview:
            if failures:
                raise failures.pop()
            return source.read(file, piece)

    assert contents_of(fetch(Unsteady(), cache)) == contents_of(folder)
    failures += [CheckpointError("it is gone")] * PIECES_IN_FLIGHT
    with pytest.raises(CheckpointError, match=r"^it is gone$"):
        fetch(Unsteady(), cache / "other")


@pytest.mark.parametrize("num_arrived", [0, 1, 4, 6])
def test_interrupted_fetch_goes_on(source: DialledPieces, folder: Path, cache: Path, num_arrived: int) -> None:
    """After an interruption only the pieces that have not arrived are fetched."""
    source.fail_after = num_arrived
    with pytest.raises(SourceLost):
        fetch(source, cache, pieces_in_flight=1)
    assert len(source.asked) == num_arrived
    again = DialledPieces(folder)
    said: list[str] = []
    arrived = fetch_checkpoint(again, again.manifest(), cache, said.append, is_right=lambda _: True)
    assert contents_of(arrived) == contents_of(folder)
    assert not set(again.asked) & set(source.asked)
    assert len(again.asked) == num_pieces_of(again.manifest()) - num_arrived
    assert ("from an earlier attempt" in said[0]) == (num_arrived > 0)


def test_spoiled_partial_copy_is_repaired(source: DialledPieces, folder: Path, cache: Path) -> None:
    """What an interruption left is checked against the digests: wrong bytes, lengths and files do not survive."""
    source.fail_after = num_pieces_of(source.manifest()) - 1
    with pytest.raises(SourceLost):
        fetch(source, cache, pieces_in_flight=1)
    partial = cache / (source.manifest().digest + PARTIAL_SUFFIX)
    with (partial / SINGLE).open("r+b") as file:
        file.seek(1500)
        file.write(b"#")
        file.truncate(9000)
    (partial / "left.json").write_bytes(b"{}")
    (partial / "left").mkdir()
    (partial / "left" / "over").write_bytes(b"")
    source.fail_after = None
    source.asked.clear()
    assert contents_of(fetch(source, cache)) == contents_of(folder)
    assert (SINGLE, 1) in source.asked
    assert len(source.asked) < num_pieces_of(source.manifest())


def test_damaged_copy_is_repaired(source: DialledPieces, folder: Path, cache: Path) -> None:
    """Of a folder that was fetched earlier and is damaged, only the damaged pieces are fetched again."""
    arrived = fetch(source, cache)
    with (arrived / SINGLE).open("r+b") as file:
        file.write(b"#")
    shutil.copytree(arrived, cache / (arrived.name + PARTIAL_SUFFIX))
    source.asked.clear()
    assert fetch(source, cache, is_right=lambda _: True) == arrived
    assert source.asked == []
    assert fetch(source, cache, is_right=lambda _: False) == arrived
    assert source.asked == [(SINGLE, 0)]
    assert contents_of(arrived) == contents_of(folder)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No more pieces than configured are in memory at a time, however many there are."""
    source = DialledPieces(make_folder(tmp_path / "checkpoint", num_bytes=40_000))
    num_held, most, num_reads = 0, 0, 0
    lock, together = threading.Lock(), threading.Barrier(3)

    class Buffer(bytearray):
        def __del__(self) -> None:
            nonlocal num_held
            with lock:
                num_held -= 1

    class Counting:
        manifest = source.manifest

        def read(self, file: str, piece: int) -> memoryview:
            nonlocal num_held, most, num_reads
            with lock:
                num_held += 1
                most = max(most, num_held)
                num_reads += 1
                is_early = num_reads <= together.parties
            if is_early:
                together.wait()
            data = bytearray(source.read(file, piece))
            if piece % 5 == 0:
                data += b"x" if source.asked.count((file, piece)) == 1 else b""
            return memoryview(Buffer(data))

    fetch(Counting(), tmp_path / "cache", pieces_in_flight=3)
    assert 1 < most <= 3
    assert num_held == 0


def test_processes_fetch_once(source: DialledPieces, folder: Path, cache: Path, tmp_path: Path) -> None:
    """Processes that want the same checkpoint at the same time fetch each piece once; all get the same folder."""
    program = """
        import sys
        from pathlib import Path
        from quipu.actors.fleet.cluster.shipping import fetch_checkpoint
        from tests.actors.fleet.cluster.folders import DialledPieces
        folder, cache = map(Path, sys.argv[1:3])
        source = DialledPieces(folder)
        manifest = source.manifest()
        print("ready", flush=True)
        sys.stdin.readline()
        say = lambda line: print(line, flush=True)
        print(fetch_checkpoint(source, manifest, cache, say, is_right=lambda _: True))
        print(len(source.asked))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder), str(cache)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    root = Path(__file__).resolve().parents[4]
    processes = [subprocess.Popen(command, cwd=root, **pipes) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate()[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert {lines[-2] for lines in outputs} == {str(cache / source.manifest().digest)}
    assert sorted(int(lines[-1]) for lines in outputs) == [0, 0, num_pieces_of(source.manifest())]
    assert contents_of(cache / source.manifest().digest) == contents_of(folder)


def test_waits_for_the_one_that_fetches(source: DialledPieces, folder: Path, cache: Path) -> None:
    """The second of two fetches says that it waits, and continues where the first one fails."""
    manifest = source.manifest()
    reading, fail = threading.Event(), threading.Event()
    said: list[str] = []

    class Stuck:
        manifest = source.manifest

        def read(self, file: str, piece: int) -> memoryview:
            if len(source.asked) < 2:
                return source.read(file, piece)
            reading.set()
            fail.wait()
            raise CheckpointError("lost")

    def first() -> None:
        with pytest.raises(CheckpointError, match="lost"):
            fetch(Stuck(), cache, pieces_in_flight=1)

    def second() -> None:
        fetch_checkpoint(other, manifest, cache, said.append, is_right=lambda _: True)

    other = DialledPieces(folder)
    threads = [threading.Thread(target=run) for run in (first, second)]
    threads[0].start()
    reading.wait()
    threads[1].start()
    eventually(lambda: said, "the second one waits")
    assert said == ["another engine on this node is fetching the checkpoint; waiting for it"]
    assert other.asked == []
    fail.set()
    for thread in threads:
        thread.join()
    assert contents_of(cache / manifest.digest) == contents_of(folder)
    assert len(other.asked) == num_pieces_of(manifest) - 2


def test_no_room(source: DialledPieces, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk has too little room, nothing is fetched, and the error says how many bytes are needed and free."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.used, 4000))
    needed = source.manifest().num_bytes
    with pytest.raises(CheckpointError, match=f"no room in {cache}: .* needs {needed} bytes more, and 4000 bytes are"):
        fetch(source, cache)
    assert source.asked == []


def test_disk_fills_up_meanwhile(source: DialledPieces, folder: Path, cache: Path, monkeypatch: Any) -> None:
    """If others fill the disk during a fetch, the error is the same; once there is room, the next fetch continues."""
    real, written = os.pwrite, 0

    def full(descriptor: int, data: memoryview, at: int) -> int:
        nonlocal written
        if written >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += 1
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"no room in .* bytes more, and \d+ bytes are free"):
        fetch(source, cache, pieces_in_flight=1)
    monkeypatch.undo()
    again = DialledPieces(folder)
    assert contents_of(fetch(again, cache)) == contents_of(folder)
    assert len(again.asked) == num_pieces_of(again.manifest()) - 2


def test_partial_writes(source: DialledPieces, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system writes only part of a piece at a time, the rest is written in further calls."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:7], at))
    assert contents_of(fetch(source, cache)) == contents_of(folder)


def test_only_complete_folders_have_their_name(source: DialledPieces, cache: Path, monkeypatch: Any) -> None:
    """The folder gets its name only after every file, and the folder itself, have reached the disk."""
    synced: set[int] = set()
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def rename(path: Path, target: Path) -> Path:
        assert synced == {path.stat().st_ino, *(file.stat().st_ino for file in path.iterdir())}
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    arrived = fetch(source, cache)
    assert cache.stat().st_ino in synced
    assert arrived.is_dir()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x"])
def test_manifest_cannot_name_other_folders(source: DialledPieces, cache: Path, tmp_path: Path, name: str) -> None:
    """A manifest with a file name that leads elsewhere is refused before anything is written."""
    first, *others = source.manifest().files
    files = tuple(sorted((attrs.evolve(first, name=name), first, *others), key=lambda file: file.name))
    with pytest.raises(CheckpointError, match="not a file in a checkpoint's folder"):
        fetch_checkpoint(source, Manifest(files, PIECE_BYTES), cache, silent, is_right=lambda _: True)
    assert not cache.exists()


def test_links_in_the_partial_copy_are_not_followed(source: DialledPieces, folder: Path, cache: Path) -> None:
    """A symbolic link with the name of a file or of the folder itself does not lead a write outside."""
    outside = cache.parent / "precious"
    partial = cache / (source.manifest().digest + PARTIAL_SUFFIX)
    partial.mkdir(parents=True)
    outside.write_bytes(b"precious")
    (partial / SINGLE).symlink_to(outside)
    assert contents_of(fetch(source, cache)) == contents_of(folder)
    assert outside.read_bytes() == b"precious"
    other = cache.parent / "other"
    other.mkdir()
    target = cache.parent / "target"
    target.mkdir()
    (other / partial.name).symlink_to(target)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        fetch(source, other)
    assert list(target.iterdir()) == []


def test_link_that_appears_meanwhile_is_not_followed(source: DialledPieces, folder: Path, cache: Path) -> None:
    """A file that is replaced by a link while pieces arrive is an error, and nothing is written through it."""
    outside = cache.parent / "precious"
    partial = cache / (source.manifest().digest + PARTIAL_SUFFIX)

    def replace(data: memoryview) -> memoryview:
        outside.write_bytes(b"precious")
        for file in source.manifest().files:
            (partial / file.name).unlink()
            (partial / file.name).symlink_to(outside)
        return data

    source.spoil, source.num_spoiled = replace, 1
    with pytest.raises(CheckpointError, match="cannot be written: Too many levels of symbolic links"):
        fetch(source, cache, pieces_in_flight=1)
    assert outside.read_bytes() == b"precious"


def test_nothing_is_read_of_a_file_that_was_not_begun(
    source: DialledPieces, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that were never written are not hashed before they are fetched, so a new fetch starts at once."""
    hashed: list[int] = []

    def hash_span(descriptor: int, start: int, end: int) -> bytes:
        hashed.append(start)
        return manifest_module.hash_span(descriptor, start, end)

    monkeypatch.setattr(partial_copy, "hash_span", hash_span)
    fetch(source, cache)
    assert hashed == []


def test_cache_that_cannot_be_made(source: DialledPieces, tmp_path: Path) -> None:
    """A file where the cache should be is an error that names it."""
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cache cannot be used: (File exists|Not a directory)"):
        fetch(source, tmp_path / "cache")


def test_changed_file_of_the_source(source: DialledPieces, folder: Path, cache: Path) -> None:
    """A file that changes on the node that ships is an error that says so, not one about wrong pieces."""
    manifest = source.manifest()
    (folder / SINGLE).write_bytes(b"another one")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        fetch(source, cache)
    assert manifest != make_manifest(folder, piece_bytes=PIECE_BYTES).manifest
