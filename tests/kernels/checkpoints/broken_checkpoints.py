"""Ways in which a checkpoint can be broken, each with what the refusal must say. For `test_broken_checkpoints.py` here
and the server's own test.

A way takes a folder with a `model.safetensors` (of the demo's shape or the tests' small Llama) and spoils it.
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
    spoil: Callable[[Path], None]
    named: str
    """A pattern that the refusal matches."""


def change_header(change: Callable[[Header], object], *, more: bytes = b"") -> Callable[[Path], None]:
    """Rewrite the header alone; the tensors' bytes stay, with `more` behind them."""

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
    """Lose the end of the file."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return spoil


def in_two(folder: Path, *, lost: str | None = None, forgotten: str | None = None) -> None:
    """Make shards of it: without the tensor `lost`, which the index promises, or with one that it does not name."""
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
    """One row more than there are bytes for."""
    header[UP]["shape"][0] += 1


def reach_beyond(header: Header) -> None:
    last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"][1] += 4 * last["shape"][-1]
    last["shape"][0] += 2 if last["dtype"] == "BF16" and len(last["shape"]) > 1 else 1


def shrink(header: Header) -> None:
    """One row less than there are bytes for, and its bytes are nobody's."""
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
    "header is no JSON": Break(
        lambda folder: (folder / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"{oops"),
        "its header is damaged",
    ),
    "a shape that its bytes are not": Break(change_header(grow), f"tensor {UP} takes"),
    "two tensors in one place": Break(
        change_header(swap_ends), "cannot be read: tensor .* overlaps|leaves a gap|takes"
    ),
    "offsets beyond the file": Break(change_header(reach_beyond), r"tensor \S+ (ends at byte|takes)"),
    "offsets that are none": Break(
        change_header(lambda header: header[UP].update(data_offsets=[-8, 0])), f"invalid header entry for tensor {UP}"
    ),
    "an entry without a shape": Break(
        change_header(lambda header: header[UP].pop("shape")), f"invalid header entry for tensor {UP}"
    ),
    "a gap between two tensors": Break(change_header(shrink), f"leaves a gap after tensor {UP}"),
    "a name twice": Break(name_twice, f"damaged .{UP} is in it twice"),
    "bytes that belong to nobody": Break(change_header(lambda header: None, more=b"12345678"), "8 bytes after tensor"),
    "a tensor is missing": Break(change_tensors(lambda tensors: tensors.pop(UP)), f"lacks tensor {UP}"),
    "a tensor too many": Break(
        change_tensors(lambda tensors: tensors.update({"model.layers.1.extra": torch.ones(2)})),
        "does not use: model.layers.1.extra",
    ),
    "a tensor of another shape": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP][:-1].contiguous()})),
        rf"tensor {UP} has shape \(\d+, \d+\), config.json says",
    ),
    "a tensor of integers": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)})), f"{UP} is stored as I8"
    ),
    "a tensor of eight bits": Break(
        change_tensors(lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)})),
        f"{UP} is stored as F8_E4M3",
    ),
    "not a number in a matrix": Break(put(float("nan")), rf"{UP} has a value that is not finite: nan at \(3, 5\)"),
    "infinity in a matrix": Break(put(float("-inf")), rf"{UP} has a value that is not finite: -inf at \(3, 5\)"),
    "not a number in a vector": Break(
        put(float("nan"), NORM, at=(1,)), rf"{NORM} has a value that is not finite: nan at \(1,\)"
    ),
    "not a number in the last element": Break(
        put(float("nan"), at=(-1, -1)), f"{UP} has a value that is not finite: nan"
    ),
    "a shard is missing": Break(
        without_a_shard, r"lacks file model-00002-of-00002.safetensors, which holds tensor \S+"
    ),
    "a shard lacks a tensor": Break(
        lambda folder: in_two(folder, lost=UP), f"lacks tensor {UP}, which model.safetensors.index.json says it holds"
    ),
    "a shard holds one that the index does not": Break(
        without_a_layer,
        r"does not use: model\.layers\.1\.\S+",
    ),
    "a tensor in two shards": Break(with_one_twice, r"tensor \S+ is in both model-00001\S+ and model-00002"),
}


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
