"""Where a node looks for the checkpoint, how it recognizes the wanted one, and the error if it has none."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from quipu.actors.config.cluster_config import SHIP_FLAG
from quipu.actors.fleet.cluster.checkpoint_finder import Wanted, default_cache, describe_wanted, find_or_fetch
from quipu.actors.fleet.cluster.outline import NUM_SAMPLES, SAMPLE_BYTES, find_difference, make_outline
from quipu.actors.fleet.cluster.served_files import SINGLE
from quipu.actors.shared.checkpoint import DEMO, CheckpointError, resolve
from tests.actors.fleet.cluster.folders import (
    ELSEWHERE,
    DialledPieces,
    contents_of,
    make_folder,
    silent,
    wanted_elsewhere,
)
from tests.kernels.checkpoints.gguf_files import write_gguf
from tests.tiny import TINY

MODULES = sorted((Path(__file__).resolve().parents[4] / "actors" / "fleet" / "cluster").glob("*.py"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "checkpoint", num_bytes=600_000)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_same_path(folder: Path, cache: Path) -> None:
    """A node that has the checkpoint at the server's path uses it, and fetches nothing."""
    source = DialledPieces(folder)
    assert find_or_fetch(describe_wanted("tiny", folder), source, cache, silent) == folder
    assert source.asked == []
    assert not cache.exists()


def test_demo_is_part_of_the_package(cache: Path) -> None:
    """A node on which quipu is installed elsewhere has the demo model."""
    wanted = Wanted("demo", ELSEWHERE, make_outline(DEMO))
    assert find_or_fetch(wanted, None, cache, silent) == DEMO
    with pytest.raises(CheckpointError):
        find_or_fetch(Wanted("demo", ELSEWHERE, make_outline(TINY)), None, cache, silent)


def test_gguf_file(tmp_path: Path, cache: Path) -> None:
    """A GGUF file is found at the path that the operator named, whatever the server's folder for it is called."""
    file = tmp_path / "small.gguf"
    write_gguf(file, "qwen3", TINY, tokenizer=TINY)
    outline = make_outline(resolve(str(file)))
    found = find_or_fetch(Wanted(str(file), ELSEWHERE, outline), None, cache, silent)
    assert (found / "model.gguf").resolve() == file
    with pytest.raises(CheckpointError, match=r"other\.gguf: not there"):
        find_or_fetch(Wanted(str(tmp_path / "other.gguf"), ELSEWHERE, outline), None, cache, silent)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a hub cache in which `owner/name` has one commit, and return the repository's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    make_folder(repository / "snapshots" / ("a" * 40), num_bytes=600_000)
    return repository


def test_hub_cache(hub: Path, folder: Path, cache: Path) -> None:
    """A hub id is found in the node's hub cache, if it is the same checkpoint; nothing is downloaded."""
    assert find_or_fetch(wanted_elsewhere(folder, "owner/name"), None, cache, silent) == hub / "snapshots" / ("a" * 40)
    with pytest.raises(CheckpointError, match=r"the hub cache .*/hub: not there"):
        find_or_fetch(wanted_elsewhere(folder, "owner/other"), None, cache, silent)
    (hub / "snapshots" / ("a" * 40) / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the hub cache .*/hub: model.safetensors has 0 bytes instead of 600000"):
        find_or_fetch(wanted_elsewhere(folder, "owner/name"), None, cache, silent)


def test_gguf_in_the_hub_cache(hub: Path, cache: Path) -> None:
    """One type of a repository's GGUF files is found in the node's hub cache; nothing is downloaded."""
    file = hub / "snapshots" / ("a" * 40) / "small-Q8_0.gguf"
    write_gguf(file, "qwen3", TINY, tokenizer=TINY)
    outline = make_outline(resolve(str(file)))
    found = find_or_fetch(Wanted("owner/name:q8_0", ELSEWHERE, outline), None, cache, silent)
    assert (found / "model.gguf").resolve() == file
    with pytest.raises(CheckpointError, match=r"the hub cache .*/hub: not there"):
        find_or_fetch(Wanted("owner/name:Q4_0", ELSEWHERE, outline), None, cache, silent)


def test_hub_cache_has_the_servers_commit(hub: Path, folder: Path, cache: Path) -> None:
    """A node whose hub cache has a newer commit too finds the one that the server serves."""
    (hub / "refs" / "main").write_text("b" * 40)
    make_folder(hub / "snapshots" / ("b" * 40), num_bytes=100)
    path = f"/server/hub/models--owner--name/snapshots/{'a' * 40}"
    wanted = Wanted("owner/name", path, make_outline(folder))
    assert find_or_fetch(wanted, None, cache, silent).name == "a" * 40


def test_fetched_once(folder: Path, cache: Path) -> None:
    """A missing checkpoint is fetched, and found the next time, with or without a source."""
    source = DialledPieces(folder, piece_bytes=100_000)
    wanted = wanted_elsewhere(folder)
    said: list[str] = []
    arrived = find_or_fetch(wanted, source, cache, said.append)
    assert arrived.parent == cache
    assert contents_of(arrived) == contents_of(folder)
    assert said[0].startswith("the checkpoint is not on this node; looked for in: /on/the/servers/node: not there")
    num_asked = len(source.asked)
    assert find_or_fetch(wanted, source, cache, said.append) == find_or_fetch(wanted, None, cache, silent) == arrived
    assert said[-1] == f"found the checkpoint in {arrived}"
    assert len(source.asked) == num_asked


def test_not_found(folder: Path, cache: Path) -> None:
    """Without a source the error names the node, the model, each place and what is wrong there, and the flag."""
    make_folder(cache / "0123", {"config.json": b"{}"})
    (cache / "4567.partial").mkdir()
    wanted = Wanted("owner/name", str(folder), make_outline(folder))
    (folder / "tokenizer.json").write_bytes(b"[]" * 600)
    with pytest.raises(CheckpointError) as error:
        find_or_fetch(wanted, None, cache, silent)
    assert str(error.value) == (
        f"node {socket.gethostname()} does not have the checkpoint of owner/name. Looked for in: {folder}: the "
        f"contents of tokenizer.json differ; the hub cache {constants.HF_HUB_CACHE}: not there; {cache}/0123: "
        f"config.json has 2 bytes instead of 22. Put it there at the same path, or have the server ship it "
        f"with {SHIP_FLAG}"
    )


def test_source_offers_another_checkpoint(folder: Path, cache: Path, tmp_path: Path) -> None:
    """A source with files of other sizes is refused before anything is fetched, one with other contents afterwards."""
    source = DialledPieces(make_folder(tmp_path / "other", num_bytes=7))
    with pytest.raises(CheckpointError, match=f"node {socket.gethostname()} could not fetch .* offers other files"):
        find_or_fetch(wanted_elsewhere(folder), source, cache, silent)
    assert source.asked == []
    shutil.copytree(folder, tmp_path / "same size")
    (tmp_path / "same size" / SINGLE).write_bytes(bytes(600_000))
    source = DialledPieces(tmp_path / "same size", piece_bytes=100_000)
    with pytest.raises(CheckpointError, match=r"is not what the server serves: the contents of model\.safetensors"):
        find_or_fetch(wanted_elsewhere(folder), source, cache, silent)


def change(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_what_is_compared(folder: Path) -> None:
    """Small files are compared whole; of weights, the header, the last bytes and samples from the whole file."""
    outline = make_outline(folder)
    assert find_difference(folder, outline) is None
    size = 600_000
    header = int.from_bytes((folder / SINGLE).read_bytes()[:8], "little")
    assert header > size, "the random bytes must be all header, so that all of them are compared"
    weights = folder / SINGLE
    weights.write_bytes((1000).to_bytes(8, "little") + bytes(size - 8))
    outline = make_outline(folder)
    for at in (0, 8, 1007, size - 1, size - SAMPLE_BYTES):
        change(weights, at)
        assert find_difference(folder, outline) == "the contents of model.safetensors differ"
        change(weights, at)
    assert find_difference(folder, outline) is None
    gap = (size - 1008) // NUM_SAMPLES
    for start in range(1008, size - gap, gap):  # fine-tuning changes all of a tensor
        for at in range(start, start + gap, SAMPLE_BYTES // 2):
            change(weights, at)
        assert find_difference(folder, outline) is not None
        for at in range(start, start + gap, SAMPLE_BYTES // 2):
            change(weights, at)
    change(folder / "tokenizer.json", 700)
    assert find_difference(folder, outline) == "the contents of tokenizer.json differ"
    change(folder / "tokenizer.json", 700)
    (folder / "chat_template.jinja").write_text("")
    assert find_difference(folder, outline) == "it also has chat_template.jinja"


def test_samples_are_few(tmp_path: Path) -> None:
    """Comparing reads only samples of a large file, which may have terabytes."""
    folder = make_folder(tmp_path / "checkpoint")
    with (folder / SINGLE).open("wb") as file:
        file.truncate(1 << 42)
    assert find_difference(folder, make_outline(folder)) is None


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is where the XDG Base Directory Specification puts it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/disk")
    assert default_cache() == Path("/big/disk/quipu/checkpoints")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == Path.home() / ".cache" / "quipu" / "checkpoints"


def test_nothing_of_ray_is_imported() -> None:
    """Importing every module of the folder imports neither Ray nor the hub's client nor torch."""
    names = [f"quipu.actors.fleet.cluster.{path.stem}" for path in MODULES]
    code = f"""
import sys, {", ".join(names)}
loaded = {{name.split(".")[0] for name in sys.modules}} & {{"ray", "huggingface_hub", "torch"}}
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
