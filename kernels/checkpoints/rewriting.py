"""`quipu quantize`: a checkpoint of plain numbers, written anew with quantized matrices as compressed-tensors.

`web/cli/quantize_command.py` calls `rewrite`. vLLM and transformers read the result: matrices of layers are quantized,
embedding, head, routers and norms are not. Scales are rounded to the model's dtype, which is how readers hold them.

What must always hold: the new folder appears complete or not at all, and nothing that exists is overwritten; memory
does not grow with the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from .packed_words import pack_bytes, pack_nibbles
from .quantized import QuantizedLayout, quantize
from .quantizing import Quantization, is_linear
from .rewritten_formats import FORMATS
from .safetensors_writer import NewTensor, SafetensorsWriter
from .sources import Shape, Source
from .weights import QUANTIZED_PIECE, open_source

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files that hold weights, and are not copied; nor are their indexes."""
_NEVER = (
    r"re:.*\.mlp\.(shared_expert_)?gate$",
    r"re:.*\.block_sparse_moe\.(gate|router\.layer)$",
    r"re:.*\.feed_forward\.router$",
    r"re:.*\.kv_b_proj$",
    r"re:.*\.router\.proj$",
    r"re:.*\.per_layer_(input_gate|projection|model_projection)$",
    r"re:.*\.altup\..*$",
    r"re:.*\.altup_(unembed_)?projections\..*$",
    r"re:.*\.laurel\..*$",
)
"""Modules that are never quantized, as readers of the format take them."""


@attrs.frozen
class Rewritten:
    """What was written."""

    num_quantized: int
    """Matrices."""
    num_bytes: int
    """Of all files."""
    read_bytes: int
    """Of the model's weights as they were."""
    kept: tuple[str, ...]
    """Matrices of layers that are not quantized: groups do not divide their rows."""


def rewrite(model_path: Path, config: dict[str, Any], out: Path, form: str, *, max_shard_bytes: int) -> Rewritten:
    """Write the checkpoint in `model_path` to the new folder `out`.

    `config` is its `config.json`, of a family that is served: in others, what readers take for a matrix of a layer may
    not be one here. Raises ValueError for a checkpoint that cannot be read, or is quantized already; FileExistsError.
    """
    if form not in FORMATS:
        raise ValueError(f"unknown format {form!r}: choose {', '.join(FORMATS)}")
    quantization = Quantization.parse("int8" if form == "w8a8" else form)
    source, dtype, _ = open_source(model_path, config, load_format="auto", dtype="auto")
    layouts: dict[str, QuantizedLayout] = {}
    for name, shape in source.shapes.items():
        if source.layout(name) is not None:
            raise ValueError(f"the checkpoint is quantized already: tensor {name} is {source.format(name)}")
        if is_linear(name) and (layout := quantization.layout(name, shape)) is not None:
            layouts[name] = layout
    kept = tuple(sorted(name for name in source.shapes if is_linear(name) and name not in layouts))
    if not layouts:
        raise ValueError(f"the checkpoint has no matrices that can be quantized as {form}")
    with _new_folder(out) as folder:
        _copy_others(model_path, folder)
        new = config | {
            "dtype": str(dtype).removeprefix("torch."),
            "quantization_config": _describe(form, quantization, kept),
        }
        new.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(new, indent=2) + "\n")
        groups = [_plan(name, shape, layouts.get(name), dtype, form) for name, shape in source.shapes.items()]
        writer = SafetensorsWriter(folder, groups, max_shard_bytes)
        for name, shape in source.shapes.items():
            source.check(name, shape)
            _write(writer, source, name, shape, layouts.get(name), dtype, form)
        source.check_all_used(frozenset())
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    read = sum(torch.Size(shape).numel() for shape in source.shapes.values()) * dtype.itemsize
    return Rewritten(len(layouts), written, read, kept)


def _describe(form: str, quantization: Quantization, kept: tuple[str, ...]) -> dict[str, Any]:
    """Return the `quantization_config`."""
    by_group = quantization.group_size is not None
    weights = {
        "num_bits": quantization.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if by_group else "channel",
        "group_size": quantization.group_size,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
    stored = "int-quantized" if form == "w8a8" else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if form == "w8a8" else None,
        "output_activations": None,
        "format": stored,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *_NEVER, *(name.removesuffix(".weight") for name in kept)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _plan(name: str, shape: Shape, layout: QuantizedLayout | None, dtype: torch.dtype, form: str) -> list[NewTensor]:
    """Return the tensors that one of the model's becomes."""
    if layout is None:
        return [NewTensor(name, dtype, shape)]
    rows, width = shape
    scale = NewTensor(f"{name}_scale", dtype, (rows, width // layout.group_size))
    if form == "w8a8":
        return [NewTensor(name, torch.int8, shape), scale]
    packed = NewTensor(f"{name}_packed", torch.int32, (rows, -(-width * layout.bits // 32)))
    return [packed, scale, NewTensor(f"{name}_shape", torch.int64, (2,))]


def _write(
    writer: SafetensorsWriter,
    source: Source,
    name: str,
    shape: Shape,
    layout: QuantizedLayout | None,
    dtype: torch.dtype,
    form: str,
) -> None:
    width = torch.Size(shape[1:]).numel()
    step = max(1, QUANTIZED_PIECE // width)
    if layout is not None and form != "w8a8":
        writer.write(f"{name}_shape", 0, torch.tensor(shape))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        read = torch.empty(count * width, dtype=dtype)
        source.copy(name, first * width, read)
        if layout is None:
            writer.write(name, first * width, read)
            continue
        rows = quantize(read.view(count, width), layout, scale_dtype=dtype)
        writer.write(f"{name}_scale", first * rows.scales_OG.shape[1], rows.scales_OG.to(dtype))
        if form == "w8a8":
            writer.write(name, first * width, rows.codes_OI)
        else:
            packed = pack_nibbles(rows.codes_OI) if layout.bits == 4 else pack_bytes(rows.codes_OI)
            writer.write(f"{name}_packed", first * packed.shape[1], packed)


def _copy_others(model_path: Path, folder: Path) -> None:
    """Copy the files that hold no weights, those in folders too."""
    for path in sorted(model_path.rglob("*")):
        place = path.relative_to(model_path)
        is_weights = path.suffix in _WEIGHTS or ".index" in path.suffixes
        is_hidden = any(part.startswith(".") for part in place.parts)
        if path.is_file() and not is_weights and not is_hidden and place != Path("config.json"):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / place)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Make a folder that gets its name at the end of the block, and is removed if that fails."""
    if os.path.lexists(out):
        raise FileExistsError(f"{out} exists already")
    folder = out.parent / f".{out.name}.{os.getpid()}.partial"
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in filter(Path.is_file, folder.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if os.path.lexists(out):
            raise FileExistsError(f"{out} exists already")
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
