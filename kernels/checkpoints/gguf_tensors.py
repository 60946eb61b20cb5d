"""Reading the tensors of a GGUF file by the names and in the order of rows that models use.

`weights.py` calls `open_gguf` for a folder that `gguf_folder.py` has made. Three things differ from other checkpoints:
for Llama, Granite and SmolLM3, llama.cpp stores the rows of query and key heads in the order of its own rotary
embedding; for Gemma 2 and 3 it adds 1 to the weights of norms, as the model does; and all experts of a layer are in one
tensor, as queries, keys and values of ChatGLM may be. What makes keys and values of latents is in two
(`gguf_latents.py`).

What must always hold: the rows of a tensor are those of the checkpoint that the file was made from, quantized or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from .files import MappedFiles, StoredTensor
from .gguf_file import BLOCKS, GgufFile, GgufTensor, shown
from .gguf_latents import LatentMatrix
from .gguf_names import FREQUENCIES, fused_heads, latent_part, rename, rename_stacked, rotated_heads
from .gguf_parts import read_gguf_model
from .gguf_types import DECODERS
from .quantized import QuantizedLayout, QuantizedRows
from .stored_matrices import StoredMatrix


@attrs.frozen(kw_only=True)
class GgufMatrix:
    """Implements `StoredMatrix`: a tensor, or one expert's rows of it."""

    shape: tuple[int, ...]
    type: str
    raw: StoredTensor
    """Quantized rows as bytes, others as the numbers that they are."""
    num_heads: int | None
    """Heads whose rows are interleaved; None: the rows are in order."""
    subtrahend: float
    """Was added to every number."""

    @property
    def layout(self) -> QuantizedLayout | None:
        return DECODERS[self.type].layout if self.type in DECODERS else None

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.raw]

    @property
    def format(self) -> str:
        return self.type.lower()

    def rows(self, files: MappedFiles, first: int, count: int) -> QuantizedRows | torch.Tensor:
        order = None if self.num_heads is None else self._order(self.num_heads, first, count)
        start, end = (first, first + count) if order is None else (int(order.min()), int(order.max()) + 1)
        read = files.rows(self.raw, start, end - start)
        if order is not None:
            read = read[order - start]
        decoder = DECODERS.get(self.type)
        if decoder is None:
            rows: QuantizedRows | torch.Tensor = read.float() - self.subtrahend
        else:
            rows = decoder.decode(read.view(count, -1, BLOCKS[self.type][1]))
        width = self.raw.shape[1] if len(self.raw.shape) > 1 else 1
        files.drop(self.raw, start * width, (end - start) * width)
        return rows

    def _order(self, num_heads: int, first: int, count: int) -> torch.Tensor:
        """Return which stored rows these are. A head's first half is stored in its even rows, the second in its odd."""
        head_dim = self.shape[0] // num_heads
        rows = torch.arange(first, first + count)
        head, within = rows // head_dim, rows % head_dim
        half = head_dim // 2
        return head * head_dim + within % half * 2 + within // half


def open_gguf(path: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredMatrix]]:
    """Return the plain tensors of a model, and what has to be decoded, by the names that models use.

    Raises ValueError naming the key or tensor that is invalid or not supported.
    """
    file = read_gguf_model(path)
    architecture = str(file.keys.get("general.architecture"))
    stored: dict[str, StoredTensor] = {}
    matrices: dict[str, StoredMatrix] = {}
    latents: dict[str, dict[str, GgufTensor]] = {}
    for tensor in file.tensors.values():
        if tensor.name in FREQUENCIES:
            continue
        if (latent := latent_part(tensor.name)) is not None:
            name, part = latent
            latents.setdefault(name, {})[part] = tensor
            continue
        num_dimensions = 2 if tensor.name.endswith(".bias") else 3
        experts = (
            rename_stacked(tensor.name, tensor.shape[0], architecture) if len(tensor.shape) == num_dimensions else []
        )
        if experts and num_dimensions == 2 and tensor.type in DECODERS:
            raise ValueError(f"tensor {tensor.name} is {tensor.type}, must be plain numbers")
        if experts:
            raw = _raw(tensor)
            stored[raw.name] = raw
            matrices |= {name: _expert(tensor, raw, index, len(experts)) for index, name in enumerate(experts)}
            continue
        if heads := fused_heads(tensor.name, architecture):
            raw = _raw(tensor)
            stored[raw.name] = raw
            matrices |= dict(zip(heads, _queries_keys_values(file, architecture, tensor, raw), strict=True))
            continue
        name = rename(tensor.name, architecture)
        num_heads = _num_heads(file, architecture, tensor)
        subtrahend = 1.0 if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else 0.0
        if tensor.type not in DECODERS and num_heads is None and not subtrahend:
            # a score of one row
            shape = (1, *tensor.shape) if name.endswith("_gate.weight") and len(tensor.shape) == 1 else tensor.shape
            stored[name] = StoredTensor(name, tensor.path, tensor.type, shape, tensor.start, tensor.end)
            continue
        if len(tensor.shape) > 2 or (tensor.type in DECODERS and len(tensor.shape) != 2):
            raise ValueError(f"tensor {tensor.name} of {tensor.type} has shape {tensor.shape}, must be a matrix")
        raw = _raw(tensor)
        stored[raw.name] = raw
        matrices[name] = GgufMatrix(
            shape=tensor.shape, type=tensor.type, raw=raw, num_heads=num_heads, subtrahend=subtrahend
        )
    for name, parts in latents.items():
        if parts.keys() != {"k", "v"}:
            raise ValueError(
                f"it has only one of the tensors that {name} is made of: {next(iter(parts.values())).name}"
            )
        raws = {part: _raw(tensor) for part, tensor in parts.items()}
        stored |= {raw.name: raw for raw in raws.values()}
        matrices[name] = LatentMatrix.of(parts["k"], parts["v"], raws["k"], raws["v"])
    return stored, matrices


def _raw(tensor: GgufTensor) -> StoredTensor:
    """Return the stored rows of a tensor, under its own name; those of several matrices one after the other."""
    dtype, shape = tensor.type, tensor.shape
    if tensor.type in DECODERS:
        elements, num_bytes = BLOCKS[tensor.type]
        dtype, shape = "U8", (*tensor.shape[:-1], tensor.shape[-1] // elements * num_bytes)
    return StoredTensor(tensor.name, tensor.path, dtype, shape, tensor.start, tensor.end)


def _expert(tensor: GgufTensor, raw: StoredTensor, index: int, count: int) -> GgufMatrix:
    """Return one of `count` matrices or biases, of which each expert may have several."""
    if tensor.shape[0] * tensor.shape[1] % count:
        raise ValueError(f"tensor {tensor.name} has shape {tensor.shape}, must have gate and up of the same size")
    size, rows = (tensor.end - tensor.start) // count, tensor.shape[0] * tensor.shape[1] // count
    start = tensor.start + index * size
    part = attrs.evolve(raw, shape=(rows, *raw.shape[2:]), start=start, end=start + size)
    return GgufMatrix(shape=(rows, *tensor.shape[2:]), type=tensor.type, raw=part, num_heads=None, subtrahend=0.0)


def _queries_keys_values(file: GgufFile, architecture: str, tensor: GgufTensor, raw: StoredTensor) -> list[GgufMatrix]:
    """Return the rows of each, by how many heads it has of all."""
    num_heads = file.keys.get(f"{architecture}.attention.head_count")
    num_kv_heads = file.keys.get(f"{architecture}.attention.head_count_kv", num_heads)
    counts = [num_heads, num_kv_heads, num_kv_heads]
    heads = [count for count in counts if isinstance(count, int) and count > 0]
    if len(heads) != len(counts) or tensor.shape[0] % sum(heads):
        raise ValueError(f"tensor {tensor.name} has shape {tensor.shape}, must be the rows of {shown(counts)} heads")
    head_dim, row_bytes = tensor.shape[0] // sum(heads), (tensor.end - tensor.start) // tensor.shape[0]
    found, start = [], tensor.start
    for count in heads:
        rows = count * head_dim
        part = attrs.evolve(raw, shape=(rows, *raw.shape[1:]), start=start, end=start + rows * row_bytes)
        shape, start = (rows, *tensor.shape[1:]), part.end
        found.append(GgufMatrix(shape=shape, type=tensor.type, raw=part, num_heads=None, subtrahend=0.0))
    return found


def _num_heads(file: GgufFile, architecture: str, tensor: GgufTensor) -> int | None:
    key = rotated_heads(tensor.name, architecture)
    if key is None:
        return None
    num_heads = file.keys.get(f"{architecture}.{key}", file.keys.get(f"{architecture}.attention.head_count"))
    if not isinstance(num_heads, int) or num_heads < 1 or tensor.shape[0] % (2 * num_heads):
        raise ValueError(f"key '{architecture}.{key}' is {shown(num_heads)}, which does not fit tensor {tensor.name}")
    return num_heads
