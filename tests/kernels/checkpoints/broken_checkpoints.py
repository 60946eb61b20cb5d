"""Ways to corrupt a checkpoint, each with the error that it must cause. Used by `test_broken_checkpoints.py` and by a
test of the server.

Each takes a folder with a `model.safetensors` (the tiny model's, or the tests' small Llama) and corrupts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"

Header = dict[str, Any]


@attrs.frozen
class Break:
    """A way to corrupt a checkpoint."""

    spoil: Callable[[Path], None]
    named: str
    """A pattern that the error message matches."""


def change_header(change: Callable[[Header], object], *, more: bytes = b"") -> Callable[[Path], None]:
    """Rewrite only the header; the tensors' bytes stay the same, followed by `more`."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] + more)

    return spoil


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def put(value: float, name: str = UP, *, at: tuple[int, ...] = (3, 5)) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][at] = value

    return change_tensors(change)


def cut(num_bytes: int) -> Callable[[Path], None]:
    """Cut off the end of the file."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return spoil


def in_two(folder: Path, *, lost: str | None = None, forgotten: str | None = None) -> None:
    """Split it into two shards, without the tensor `lost` in its shard, or without `forgotten` in the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file and n != lost}, folder / file)
    weight_map = {name: file for name, file in files.items() if name != forgotten}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def without_a_shard(folder: Path) -> None:
    in_two(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def without_a_layer(folder: Path) -> None:
    in_two(folder, forgotten=UP)
    change_config(folder, num_hidden_layers=1)


def with_one_twice(folder: Path) -> None:
    in_two(folder)
    first, second = (folder / f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    save_file(load_file(first) | load_file(second), first)


def swap_ends(header: Header) -> None:
    header[UP]["data_offsets"] = header[NORM]["data_offsets"]


def grow(header: Header) -> None:
    """Declare one row more than there are bytes for."""
    header[UP]["shape"][0] += 1


def reach_beyond(header: Header) -> None:
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"][1] += 4 * last["shape"][-1]
    last["shape"][0] += 2 if last["dtype"] == "BF16" and len(last["shape"]) > 1 else 1


def shrink(header: Header) -> None:
    """Declare one row less than there are bytes for, so that its bytes belong to no tensor."""
    entry = header[UP]
    row = (entry["data_offsets"][1] - entry["data_offsets"][0]) // entry["shape"][0]
    entry["shape"][0] -= 1
    entry["data_offsets"][1] -= row


def name_twice(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    entry = json.dumps({UP: json.loads(header)[UP]}).encode()[1:-1]
    text = b"{" + entry + b"," + header.lstrip()[1:]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


BREAKS: dict[str, Break] = {
    "cut off in a tensor": Break(
        cut(40), r"tensor \S+ ends at byte \d+ of model.safetensors, which is truncated at \d+"
    ),
    "cut off in the header": Break(
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100]),
        "model.safetensors cannot be read: it has 100 bytes",
    ),
    "header is not JSON": Break(
        lambda folder: (folder / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"{oops"),
        "its header is damaged",
    ),
    "a shape that does not match its bytes": Break(change_header(grow), f"tensor {UP} takes"),
    "overlapping tensors": Break(change_header(swap_ends), "cannot be read: tensor .* overlaps|leaves a gap|takes"),
    "offsets beyond the file": Break(change_header(reach_beyond), r"tensor \S+ (ends at byte|takes)"),
    "invalid offsets": Break(
        change_header(lambda header: header[UP].update(data_offsets=[-8, 0])), f"invalid header entry for tensor {UP}"
    ),
    "an entry without a shape": Break(
        change_header(lambda header: header[UP].pop("shape")), f"invalid header entry for tensor {UP}"
    ),
    "a gap between two tensors": Break(change_header(shrink), f"leaves a gap after tensor {UP}"),
    "a duplicate name": Break(name_twice, f"damaged .{UP} is in it twice"),
    "trailing bytes": Break(change_header(lambda header: None, more=b"12345678"), "8 bytes after tensor"),
    "a tensor is missing": Break(change_tensors(lambda tensors: tensors.pop(UP)), f"lacks tensor {UP}"),
    "an unexpected tensor": Break(
        change_tensors(lambda tensors: tensors.update({"model.layers.1.extra": torch.ones(2)})),
        "does not use: model.layers.1.extra",
    ),
    "a tensor of a different shape": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP][:-1].contiguous()})),
        rf"tensor {UP} has shape \(\d+, \d+\), config.json says",
    ),
    "a tensor of integers": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})), f"{UP} is stored as I8"
    ),
    "a tensor of float8": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)})),
        f"{UP} is stored as F8_E4M3",
    ),
    "NaN in a matrix": Break(put(float("nan")), rf"{UP} has a value that is not finite: nan at \(3, 5\)"),
    "infinity in a matrix": Break(put(float("-inf")), rf"{UP} has a value that is not finite: -inf at \(3, 5\)"),
    "NaN in a vector": Break(
        put(float("nan"), NORM, at=(1,)), rf"{NORM} has a value that is not finite: nan at \(1,\)"
    ),
    "NaN in the last element": Break(put(float("nan"), at=(-1, -1)), f"{UP} has a value that is not finite: nan"),
    "a shard is missing": Break(
        without_a_shard, r"lacks file model-00002-of-00002.safetensors, which holds tensor \S+"
    ),
    "a shard lacks a tensor": Break(
        lambda folder: in_two(folder, lost=UP), f"lacks tensor {UP}, which model.safetensors.index.json says it holds"
    ),
    "a shard contains a tensor that the index does not": Break(
        without_a_layer,
        r"does not use: model\.layers\.1\.\S+",
    ),
    "a tensor in two shards": Break(with_one_twice, r"tensor \S+ is in both model-00001\S+ and model-00002"),
}


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
