"""GGUF models of several files, and which file of a folder is the model."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from quipu.actors.fleet.cluster.served_files import list_served_files
from quipu.kernels.checkpoints.gguf_file import read_gguf
from quipu.kernels.checkpoints.gguf_folder import find_gguf, make_gguf_folder
from tests.kernels.checkpoints.gguf_files import load_tensors, write_gguf
from tests.kernels.checkpoints.gguf_keys import KEYS, convert, opened, parsed


@pytest.fixture
def parts(tmp_path: Path, checkpoints: dict[str, Path]) -> list[Path]:
    """Several files, written by llama.cpp's own package, with the factors of the rotary embedding in the last one."""
    write_gguf(tmp_path / "m.gguf", "phi3", checkpoints["phi3"], keys=KEYS["phi3"][1], tensors_each=7)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert len(found) > 2 and not (tmp_path / "m.gguf").exists()
    assert "rope_factors_long.weight" in read_gguf(found[-1]).tensors
    return found


def test_parts_are_read_as_one_model(tmp_path: Path, parts: list[Path], checkpoints: dict[str, Path]) -> None:
    """Any part stands for the model, and so does a folder of them, also if all are links to files of other names."""
    (tmp_path / "whole").mkdir()
    whole, _ = convert(tmp_path / "whole" / "m.gguf", checkpoints["phi3"], "phi3")
    expected = opened(whole)
    linked = tmp_path / "linked"
    linked.mkdir()
    for number, path in enumerate(parts):
        (linked / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    assert find_gguf(linked) == linked / parts[0].name
    for named in (linked / parts[0].name, linked / parts[-1].name):
        folder = make_gguf_folder(named)
        assert parsed(folder) == parsed(whole)
        found = opened(folder)
        for name, tensor in load_tensors(checkpoints["phi3"]).items():
            assert torch.equal(found.tensor(name, tuple(tensor.shape)), expected.tensor(name, tuple(tensor.shape)))
        found.check_all_used()
        assert set(list_served_files(folder)) > {
            f"model-0000{n + 1}-of-0000{len(parts)}.gguf" for n in range(len(parts))
        }


def test_parts_that_do_not_fit(tmp_path: Path, parts: list[Path]) -> None:
    """Refuse a model without one of its parts, a part under another name or number, and one that is there twice."""
    first, second, *_, last = parts
    data = second.read_bytes()
    second.unlink()
    with pytest.raises(ValueError, match=rf"{second.name} cannot be read: No such file"):
        make_gguf_folder(first)
    second.write_bytes(last.read_bytes())
    with pytest.raises(ValueError, match=rf"{second.name} .*'split\.no' is {len(parts) - 1}, by its name it is 1"):
        make_gguf_folder(first)
    second.write_bytes(first.read_bytes().replace(uint16_key("split.no", 0), uint16_key("split.no", 1)))
    with pytest.raises(ValueError, match=rf"{second.name} .*tensor \S+ is in {first.name}, too"):
        make_gguf_folder(first)
    second.write_bytes(data)
    (tmp_path / "other.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=rf"other\.gguf .*'split\.count' is {len(parts)} \(NAME-00001-of-0000"):
        make_gguf_folder(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match=rf"several GGUF files, name one of them: {first.name}, other\.gguf$"):
        find_gguf(tmp_path)
    total = sum(len(read_gguf(path).tensors) for path in parts)
    changed = first.read_bytes().replace(int32_key("split.tensors.count", total), int32_key("split.tensors.count", 99))
    first.write_bytes(changed)
    with pytest.raises(ValueError, match=rf"'split\.tensors\.count' is 99, but {total} are there"):
        make_gguf_folder(first)


def uint16_key(name: str, value: int) -> bytes:
    return name.encode() + struct.pack("<IH", 2, value)


def int32_key(name: str, value: int) -> bytes:
    return name.encode() + struct.pack("<Ii", 5, value)


def test_folders(tmp_path: Path) -> None:
    """Find the only file of a folder; name them if there are several; look no further beside safetensors."""
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"several GGUF files, name one of them: a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None
