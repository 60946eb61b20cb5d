"""The manifest of a checkpoint: which files it consists of, and the digests of their pieces."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from quipu.actors.fleet.cluster import manifest as manifest_module
from quipu.actors.fleet.cluster.manifest import PIECE_BYTES, Manifest, ManifestFile, check_manifest, make_manifest
from quipu.actors.fleet.cluster.ray_pieces import LocalPieces
from quipu.actors.fleet.cluster.served_files import GGUF, INDEX, SERVED_FILES, SINGLE, list_served_files, open_unchanged
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.kernels.adapters.adapter_folder import CONFIG, WEIGHTS
from tests.actors.fleet.cluster.folders import make_folder, make_index

ROOT = Path(__file__).resolve().parents[4]
READERS = ("actors/shared", "actors/tokenizer", "actors/detokenizer", "actors/engine/executor", "kernels", "web/cli")


def test_every_file_that_is_read_is_listed() -> None:
    """Every file name of a checkpoint that appears in code which reads checkpoints is among the served files."""
    named = {
        name
        for folder in READERS
        for path in (ROOT / folder).rglob("*.py")
        if "demo" not in path.parts
        for name in re.findall(r"\"([\w.]+\.(?:json|jinja|safetensors|model|gguf|txt))\"", path.read_text())
    }
    # an adapter's files are not the checkpoint's, the server itself reads how vectors are pooled and tells engines, and
    # the last one is a key in GGUF files
    pooling = {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"}
    assert named == {*SERVED_FILES, SINGLE, GGUF, CONFIG, WEIGHTS, *pooling, "tokenizer.ggml.model"}


def test_only_served_files_are_listed(tmp_path: Path) -> None:
    """Weights in other formats, folders, hidden files and weights beside the index are left out."""
    folder = make_folder(tmp_path / "checkpoint")
    for name in ("pytorch_model.bin", "README.md", ".gitattributes", "consolidated.safetensors", "vocab.json"):
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    expected = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    assert list_served_files(folder) == expected
    (folder / "a-1.safetensors").write_bytes(b"x")
    (folder / INDEX).write_bytes(make_index(["a-1.safetensors", "a-1.safetensors"]))
    others = ("config.json", "generation_config.json", INDEX, "tokenizer.json")
    assert list_served_files(folder) == ("a-1.safetensors", *others)


@pytest.mark.parametrize("shard", ["../../key.pem", "/etc/shadow", ".hidden.safetensors", "config.json", ""])
def test_index_cannot_name_other_files(tmp_path: Path, shard: str) -> None:
    """An index that names anything but a safetensors file of the folder is refused."""
    folder = make_folder(tmp_path / "checkpoint", {"config.json": b"{}", INDEX: make_index([shard])})
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        list_served_files(folder)


def test_shard_of_another_folder_is_not_read(tmp_path: Path) -> None:
    """Only the last part of a path in the index counts, as when the engine loads it: nothing outside is read."""
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    files = {"config.json": b"{}", INDEX: make_index(["../secret.safetensors"])}
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_manifest(make_folder(tmp_path / "checkpoint", files))


def test_no_checkpoint(tmp_path: Path) -> None:
    """A folder without config.json, and a path without a folder, are errors that say so."""
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        make_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        make_manifest(tmp_path / "lost")


def test_digests_of_pieces(tmp_path: Path) -> None:
    """Each piece has the SHA-256 of its bytes; the last one may be shorter, and an empty file has none."""
    folder = make_folder(tmp_path / "checkpoint", num_bytes=2500)
    done: list[int] = []
    manifest = make_manifest(folder, piece_bytes=1000, progress=done.append).manifest
    check_manifest(manifest)
    files = {file.name: file for file in manifest.files}
    data = (folder / "model.safetensors").read_bytes()
    expected = tuple(hashlib.sha256(data[at : at + 1000]).digest() for at in (0, 1000, 2000))
    assert files["model.safetensors"] == ManifestFile("model.safetensors", 2500, expected)
    assert files["generation_config.json"].digests == ()
    assert sum(done) == manifest.num_bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_digest_names_the_contents(tmp_path: Path) -> None:
    """The total digest does not depend on where the files are; it differs if any bit, name, size or piece does."""
    first = make_manifest(make_folder(tmp_path / "one"), piece_bytes=1000).manifest
    assert first.digest == make_manifest(make_folder(tmp_path / "two"), piece_bytes=1000).manifest.digest
    folder = make_folder(tmp_path / "three")
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    digests = {first.digest, make_manifest(folder, piece_bytes=1000).manifest.digest}
    *others, last = first.files
    digests |= {
        attrs.evolve(first, files=(*others, attrs.evolve(last, **change))).digest
        for change in ({"name": "x"}, {"size": last.size + 1}, {"digests": last.digests[:1]})
    }
    assert len(digests) == 5


def test_links_are_followed(tmp_path: Path) -> None:
    """A snapshot of the hub's cache, whose files are links to blobs, has the manifest of its contents."""
    blobs = make_folder(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    assert make_manifest(snapshot).manifest == make_manifest(blobs).manifest


@pytest.mark.parametrize("change", ["written", "replaced", "appended"])
def test_file_that_changes_while_it_is_read(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file is replaced or written to while it is hashed, the error names it."""
    folder = make_folder(tmp_path / "checkpoint")
    path = folder / SINGLE
    size = path.stat().st_size

    def interfere(_: int) -> None:
        if change == "written":
            with path.open("r+b") as file:
                file.write(b"other")
            os.utime(path, ns=(0, 1))
        elif change == "appended":
            with path.open("ab") as file:
                file.write(b"more")
        else:
            (tmp_path / "new").write_bytes(b"x" * size)
            (tmp_path / "new").replace(path)

    monkeypatch.setattr(manifest_module, "HASHING_THREADS", 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors (has )?changed"):
        make_manifest(folder, piece_bytes=10_000, progress=interfere)


def test_file_that_changes_after_its_own_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file changes while others are hashed, that is an error, too: the manifest describes one moment."""
    folder = make_folder(tmp_path / "checkpoint")
    hashed = 0

    def interfere(num_bytes: int) -> None:
        nonlocal hashed
        hashed += num_bytes
        if hashed == sum(path.stat().st_size for path in folder.iterdir()):  # the last piece, of another file
            os.utime(folder / "config.json", ns=(0, 1))

    monkeypatch.setattr(manifest_module, "HASHING_THREADS", 1)
    with pytest.raises(CheckpointError, match=r"config\.json changed while it was read"):
        make_manifest(folder, piece_bytes=1000, progress=interfere)


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_file_that_changes_while_it_is_open(tmp_path: Path, change: str) -> None:
    """A file that is replaced, written to or removed while it is open is an error."""
    path = make_folder(tmp_path / "checkpoint") / SINGLE
    with pytest.raises(CheckpointError, match=r"model\.safetensors (changed while|cannot be read: No such file)"):
        with open_unchanged(path):
            if change == "written":
                os.utime(path, ns=(0, 1))
            elif change == "replaced":
                (tmp_path / "new").write_bytes(path.read_bytes())
                (tmp_path / "new").replace(path)
            else:
                path.unlink()


def test_piece_of_a_changed_file_is_not_handed_out(tmp_path: Path) -> None:
    """Reading a piece of a file that has changed since it was listed is an error."""
    folder = make_folder(tmp_path / "checkpoint")
    pieces = LocalPieces(folder, piece_bytes=1000)
    pieces.manifest()
    assert pieces.read(SINGLE, 4) == (folder / SINGLE).read_bytes()[4000:]
    os.utime(folder / SINGLE, ns=(0, 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        pieces.read(SINGLE, 4)


@pytest.mark.parametrize(("file", "piece"), [("../config.json", 0), ("/etc/passwd", 0), (SINGLE, 5), (SINGLE, -1)])
def test_only_pieces_of_the_manifest_are_read(tmp_path: Path, file: str, piece: int) -> None:
    """A source hands out nothing that is not in its manifest."""
    pieces = LocalPieces(make_folder(tmp_path / "checkpoint"), piece_bytes=1000)
    with pytest.raises(CheckpointError, match="has no piece"):
        pieces.read(file, piece)


CONFIG_FILE = ManifestFile("config.json", 1, (bytes(32),))
BAD = {
    "upwards": ManifestFile("../x", 1, (bytes(32),)),
    "absolute": ManifestFile("/etc/cron.d/x", 1, (bytes(32),)),
    "below": ManifestFile("a/b.json", 1, (bytes(32),)),
    "dots": ManifestFile("..", 1, (bytes(32),)),
    "hidden": ManifestFile(".bashrc", 1, (bytes(32),)),
    "control": ManifestFile("a\n.json", 1, (bytes(32),)),
    "null": ManifestFile("a\0", 1, (bytes(32),)),
    "long": ManifestFile("a" * 256, 1, (bytes(32),)),
    "empty": ManifestFile("", 1, (bytes(32),)),
    "too few digests": ManifestFile("model.safetensors", PIECE_BYTES + 1, (bytes(32),)),
    "too many digests": ManifestFile("model.safetensors", 0, (bytes(32),)),
    "short digest": ManifestFile("model.safetensors", 1, (b"x",)),
    "negative size": ManifestFile("model.safetensors", -1, ()),
    "twice": CONFIG_FILE,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_manifest_of_another_node_is_checked(bad: ManifestFile) -> None:
    """A manifest that names a file elsewhere, or contradicts itself, is refused."""
    files = tuple(sorted((CONFIG_FILE, bad), key=lambda file: file.name))
    with pytest.raises(CheckpointError, match="the manifest"):
        check_manifest(Manifest(files, PIECE_BYTES))


@pytest.mark.parametrize("piece_bytes", [0, -1, PIECE_BYTES + 1])
def test_size_of_pieces_is_checked(piece_bytes: int) -> None:
    """Memory is bounded by the size of pieces, so another node cannot choose it."""
    with pytest.raises(CheckpointError, match="pieces have"):
        check_manifest(Manifest((CONFIG_FILE,), piece_bytes))


def test_hashing_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run while a slice is hashed, even if the hashing thread cannot be made to release the GIL."""
    data = memoryview(bytes(manifest_module.SLICE_BYTES))
    num_hashed, num_wanted, most = 0, 20, 5000
    seen: set[int] = set()
    """How many slices had been hashed whenever this thread ran."""

    def read(_descriptor: int, _start: int, _end: int, _buffer: memoryview, use: Callable[[memoryview], None]) -> None:
        nonlocal num_hashed
        while num_hashed < most and len(seen) < num_wanted:
            use(data)
            num_hashed += 1

    monkeypatch.setattr(manifest_module, "read_slices", read)  # reading would release the GIL, too
    hasher = threading.Thread(target=manifest_module.hash_span, args=(0, 0, len(data)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread keeps the GIL until it releases it itself
    try:
        hasher.start()
        while hasher.is_alive():
            time.sleep(0)
            seen.add(num_hashed)
        hasher.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) >= num_wanted
