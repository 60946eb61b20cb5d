"""Damaged GGUF files: each is refused with a message, whatever its bytes are."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from quipu.kernels.checkpoints.gguf_file import read_gguf
from quipu.kernels.checkpoints.gguf_folder import make_gguf_folder
from quipu.kernels.checkpoints.gguf_names import rename_stacked
from quipu.kernels.checkpoints.weights import open_weights
from quipu.kernels.models.config import read_config
from quipu.kernels.models.families import find_family
from tests.kernels.checkpoints.gguf_files import write_gguf


@pytest.fixture
def small(tmp_path: Path, checkpoints: dict[str, Path]) -> Path:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", checkpoints["llama"])
    return path


def damaged(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_truncated_files(small: Path) -> None:
    """Refuse a file that ends anywhere, with a message that says where."""
    data = small.read_bytes()
    header = min(tensor.start for tensor in read_gguf(small).tensors.values())
    for length in [*range(0, header, 997), header, len(data) - 1]:
        with pytest.raises(ValueError, match=r"m\.gguf cannot be read"):
            read_gguf(damaged(small, data[:length]))


@pytest.mark.parametrize(
    ("at", "value", "named"),
    [
        (8, 2**63, "9223372036854775808 tensors"),
        (16, 2**63, "9223372036854775808 keys"),
        (24, 2**60, "the name of key 0"),
        (4, 1 << 24, "its version is"),
        (0, 0, "it is not a GGUF file"),
    ],
)
def test_absurd_counts(small: Path, at: int, value: int, named: str) -> None:
    """Refuse counts and lengths that the file has no room for, without allocating for them."""
    data = bytearray(small.read_bytes())
    data[at : at + 8] = struct.pack("<Q", value)
    with pytest.raises(ValueError, match=named):
        read_gguf(damaged(small, bytes(data)))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("dimensions", 9, "tensor output_norm.weight has 9 dimensions"),
        ("width", 2**62, "tensor output_norm.weight ends at byte"),
        ("width", 0, "tensor output_norm.weight has shape"),
        ("type", 10, "tensor output_norm.weight has type Q2_K, which is not supported"),
        ("type", 777, "tensor output_norm.weight has type number 777"),
        ("offset", 2**63, "tensor output_norm.weight ends at byte"),
        ("offset", 3, "tensor output_norm.weight starts at 3"),
        ("offset", 0, "overlaps tensor"),
    ],
)
def test_damaged_tensors(small: Path, field: str, value: int, named: str) -> None:
    """Refuse a tensor whose description is not possible, by its name."""
    data = bytearray(small.read_bytes())
    at = data.index(b"output_norm.weight") + len("output_norm.weight")
    offsets = {"dimensions": (0, "<I"), "width": (4, "<Q"), "type": (12, "<I"), "offset": (16, "<Q")}
    start, kind = offsets[field]
    struct.pack_into(kind, data, at + start, value)
    with pytest.raises(ValueError, match=named):
        read_gguf(damaged(small, bytes(data)))


def test_random_damage(small: Path) -> None:
    """Read a file with random bytes in its header, or refuse it with a ValueError; nothing else happens."""
    data = small.read_bytes()
    header = min(tensor.start for tensor in read_gguf(small).tensors.values())
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        some = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            some[draw.randrange(header)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        try:
            folder = make_gguf_folder(damaged(small, bytes(some)))
            config = read_config(folder)
            find_family(config).parse(config)
            open_weights(folder, config, load_format="auto", dtype="auto")
        except ValueError as error:
            refused += 1
            assert len(str(error)) < 2000
    assert 30 < refused < 300


@pytest.mark.parametrize("name", ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.bias", "altup_proj.weight"])
def test_more_experts_than_any_model_has(name: str) -> None:
    """Refuse them before anything is made of each."""
    assert len(rename_stacked(name, 3, "gpt-oss")) == 3
    with pytest.raises(ValueError, match=f"tensor {name} is of 1099511627776 experts or copies, at most 65536"):
        rename_stacked(name, 1 << 40, "gpt-oss")
    assert rename_stacked("output.weight", 1 << 40, "gpt-oss") == []
