"""The digest of a checkpoint's weights, and the memo of files that have not changed."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.actors.fleet.cluster import digest_memo
from quipu.actors.fleet.cluster import weights_digest as weights_digest_module
from quipu.actors.fleet.cluster.digest_memo import FileStamp
from quipu.actors.fleet.cluster.manifest import hash_span
from quipu.actors.fleet.cluster.served_files import INDEX
from quipu.actors.fleet.cluster.weights_digest import weights_digest
from quipu.actors.shared.checkpoint import CheckpointError
from tests.actors.fleet.cluster.folders import make_folder, make_index


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Return a list of the spans of files that are hashed. Pieces are small, and files count as settled at once."""
    spans: list[tuple[int, int]] = []

    def hash_and_note(descriptor: int, start: int, end: int) -> bytes:
        spans.append((start, end))
        return hash_span(descriptor, start, end)

    monkeypatch.setattr(weights_digest_module, "hash_span", hash_and_note)
    monkeypatch.setattr(weights_digest_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(digest_memo, "SETTLED_S", -1.0)
    yield spans


def change(path: Path, content: bytes) -> None:
    """Write other contents into a file, and have all times that can be set be the same as before."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_contents_that_count(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """Each byte of configuration, weights, index and code counts; where the folder lies does not."""
    files = {
        "config.json": b'{"a": 1}',
        INDEX: make_index(["a.safetensors", "b.safetensors"]),
        "a.safetensors": bytes(2500),
        "b.safetensors": bytes(range(250)) * 10,
        "quantize_config.json": b"{}",
        "modeling_it.py": b"pass",
        "preprocessor_config.json": b"{}",
    }
    digests = {weights_digest(make_folder(tmp_path / "first", files))}
    assert digests == {weights_digest(make_folder(tmp_path / "second", files))}
    for index, (name, content) in enumerate(files.items()):
        folder = make_folder(tmp_path / f"changed{index}", files)
        if name != INDEX:
            for changed in (content[:-1] + b"!", content + b"\0", content[:-1]):
                (folder / name).write_bytes(changed)
                digests.add(weights_digest(folder))
        else:
            (folder / name).write_bytes(make_index(["b.safetensors", "a.safetensors"]))
            digests.add(weights_digest(folder))
    assert len(digests) == 1 + 3 * 6 + 1
    assert reads


def test_contents_that_do_not_count(tmp_path: Path) -> None:
    """What only texts and requests depend on does not count, nor do weights that the index does not name."""
    files = {"config.json": b"{}", INDEX: make_index(["a.safetensors"]), "a.safetensors": b"x"}
    folder = make_folder(tmp_path / "checkpoint", files)
    before = weights_digest(folder)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md", "other.safetensors"):
        (folder / name).write_bytes(b"{}")
    (folder / "folder.json").mkdir()
    assert weights_digest(folder) == before


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "consolidated.safetensors", "other.pth"])
def test_weights_in_other_formats(tmp_path: Path, name: str) -> None:
    """Without an index, any file of weights counts, because some executor may read it."""
    folder = make_folder(tmp_path / "checkpoint", {"config.json": b"{}", name: b"1"})
    before = weights_digest(folder)
    (folder / name).write_bytes(b"2")
    assert weights_digest(folder) != before


def test_swapped_files_and_pieces(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """The contents of two files, or of two pieces of one, in each other's place give another digest."""
    one, other = bytes(1000), bytes([1]) * 1000
    digests = set()
    for index, (first, second) in enumerate([(one + other, one), (other + one, one), (one, one + other)]):
        files = {"config.json": b"{}", "a.safetensors": first, "b.safetensors": second}
        digests.add(weights_digest(make_folder(tmp_path / str(index), files)))
    assert len(digests) == 3


def test_names_count(tmp_path: Path) -> None:
    """The same contents under another name give another digest: which file is which counts."""
    digests = {
        weights_digest(make_folder(tmp_path / name, {"config.json": b"{}", name: b"{}", "model.safetensors": b"x"}))
        for name in ("quantize_config.json", "other.json")
    }
    assert len(digests) == 2


def test_dummy_weights(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """For weights that are drawn, configuration and seed count, and no file of weights is read."""
    folder = make_folder(tmp_path / "checkpoint")
    digests = [weights_digest(folder), weights_digest(folder, load_format="dummy")]
    reads.clear()
    digests.append(weights_digest(folder, load_format="dummy", seed=1))
    assert len(reads) == 1
    (folder / "model.safetensors").unlink()
    assert weights_digest(folder, load_format="dummy") == digests[1]
    (folder / "config.json").write_bytes(b"{ }")
    digests.append(weights_digest(folder, load_format="dummy"))
    assert len({*digests}) == 4
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        weights_digest(folder, load_format="dummy")


def test_memo(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """Only files that have changed are read again, even if they have the size and the time that they had."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "new" / "folder" / "weights.json"
    digest = weights_digest(folder, memo=memo)
    assert stat.S_IMODE(memo.parent.stat().st_mode) == 0o700
    assert len(reads) == 6 and stat.S_IMODE(memo.stat().st_mode) == 0o600
    reads.clear()
    assert weights_digest(folder, memo=memo) == digest and not reads
    change(folder / "model.safetensors", bytes(4500))
    changed = weights_digest(folder, memo=memo)
    assert changed != digest and len(reads) == 5
    assert changed == weights_digest(folder)
    other = weights_digest(make_folder(tmp_path / "other"), memo=memo)
    reads.clear()
    assert [weights_digest(each, memo=memo) for each in (folder, tmp_path / "other")] == [changed, other]
    assert not reads


def test_file_that_has_just_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is not remembered within two seconds of its change: it may change again without another time."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    now_ns = max((folder / name).stat().st_ctime_ns for name in ("config.json", "model.safetensors"))
    monkeypatch.setattr("time.time_ns", lambda: now_ns + int(1.9e9))
    weights_digest(folder, memo=memo)
    assert memo.read_bytes() == b""
    monkeypatch.setattr("time.time_ns", lambda: now_ns + int(2.1e9))
    weights_digest(folder, memo=memo)
    assert len(json.loads(memo.read_bytes())["sha256"]) == 2


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0", b"{", b"[]", b"1", b"null", b'{"version": 1}', b'{"version": 1, "sha256": []}',
        b'{"version": 1, "sha256": null}', b'{"version": 1, "sha256": {"NAME": 1}}',
        b'{"version": 1, "sha256": {"NAME": "0"}}', b'{"version": 1, "sha256": {"NAME": ["0"]}}',
        b'{"version": 2, "sha256": {"NAME": "%s"}}' % DIGEST.encode(), b"[" * 100_000, b"\xff" * 5000,
        b'{"version": 1, "sha256": {"NAME": "%s"}}' % ("g" * 64).encode(), b" " * (2 << 20),
    ],
)  # fmt: skip
def test_memo_with_other_contents(tmp_path: Path, content: bytes, reads: list[tuple[int, int]]) -> None:
    """A memo with any other contents is as good as none, and is replaced."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    digest = weights_digest(folder)
    name = FileStamp.of((folder / "model.safetensors").stat()).name
    memo.write_bytes(content.replace(b"NAME", name.encode()))
    memo.chmod(0o600)
    assert weights_digest(folder, memo=memo) == digest
    reads.clear()
    assert weights_digest(folder, memo=memo) == digest and not reads


def test_memo_that_is_read(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """The form in which the test before this one has its wrong contents is the right one otherwise."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    entries = {FileStamp.of((folder / "model.safetensors").stat()).name: DIGEST}
    memo.write_text(json.dumps({"version": 1, "sha256": entries}))
    memo.chmod(0o600)
    assert weights_digest(folder, memo=memo) != weights_digest(folder)


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "pipe", "writable", "no folder"])
def test_memo_that_others_may_have_made(tmp_path: Path, kind: str, reads: list[tuple[int, int]]) -> None:
    """A memo that is a link, no file, or writable by others is neither read nor written."""
    folder, memo, target = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json", tmp_path / "target"
    target.write_bytes(b"precious")
    target.chmod(0o600)
    match kind:
        case "link":
            memo.symlink_to(target)
        case "hard link":
            memo.hardlink_to(target)
        case "folder":
            memo.mkdir()
        case "pipe":
            os.mkfifo(memo, 0o600)
        case "writable":
            memo.write_bytes(b"precious")
            memo.chmod(0o666)
        case "no folder":
            memo = target / "weights.json"
    digest = weights_digest(folder)
    for _ in range(2):
        reads.clear()
        assert weights_digest(folder, memo=memo) == digest and len(reads) == 6
    assert target.read_bytes() == b"precious"
    if kind == "writable":
        assert memo.read_bytes() == b"precious"


def test_memo_does_not_grow(tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The memo keeps what was computed last."""
    monkeypatch.setattr(digest_memo, "MAX_ENTRIES", 4)
    memo = tmp_path / "weights.json"
    folders = [make_folder(tmp_path / str(index)) for index in range(5)]
    for folder in folders:
        weights_digest(folder, memo=memo)
    assert len(json.loads(memo.read_bytes())["sha256"]) == 4
    reads.clear()
    weights_digest(folders[4], memo=memo)
    weights_digest(folders[3], memo=memo)
    assert not reads


def test_others_wait_for_who_computes(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """While one process computes, another waits for its memo, and then reads no file."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    digest = weights_digest(folder, memo=memo)
    content = memo.read_bytes()
    os.truncate(memo, 0)
    reads.clear()
    descriptor = os.open(memo, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(weights_digest(folder, memo=memo)))
    other.start()
    other.join(0.3)
    assert not found
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)
    other.join()
    assert found == [digest] and not reads


def test_lock_that_is_never_released(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has waited too long computes without the memo."""
    monkeypatch.setattr(digest_memo, "LOCK_TIMEOUT_S", 0.01)
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    digest = weights_digest(folder, memo=memo)
    descriptor = os.open(memo, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    reads.clear()
    assert weights_digest(folder, memo=memo) == digest and reads
    os.close(descriptor)


def test_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is read is an error, and is not remembered."""
    folder, memo = make_folder(tmp_path / "checkpoint"), tmp_path / "weights.json"
    monkeypatch.setattr(digest_memo, "SETTLED_S", -1.0)

    def hash_and_change(_descriptor: int, _start: int, _end: int) -> bytes:
        change(folder / "model.safetensors", bytes(4500))
        return b""

    monkeypatch.setattr(weights_digest_module, "hash_span", hash_and_change)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        weights_digest(folder, memo=memo)
    assert memo.read_bytes() == b""


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    """A folder without config.json is an error."""
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        weights_digest(tmp_path)
