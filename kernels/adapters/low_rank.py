"""An adapter's matrices, read from its files and checked, and combined for products that a model has fused.

A module's product x @ W.T becomes x @ W.T + scale * (x @ A.T) @ B.T (Hu et al., arXiv:2106.09685). The scale is
multiplied into B once, in float32. Both are then rounded to the dtype of the model's weights, as vLLM rounds them, and
products with them are summed in float32.

What must always hold: every module that the configuration targets has both matrices, in the shapes that follow from it
and from the model; no tensor is left over; all elements are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import torch

from ..checkpoints.files import STORED_DTYPES, StoredTensor, parse_header
from ..checkpoints.weights import Shape
from .adapter_folder import WEIGHTS, AdapterFiles
from .named_weights import Part
from .peft_config import PeftConfig, parse_peft_config

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_MOST_HEADER_BYTES = 16 << 20


@attrs.frozen(eq=False)
class LowRank:
    """The two matrices of a product."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    """Multiplied by the scale."""

    @property
    def rank(self) -> int:
        return self.a_RI.shape[0]


def most_bytes(linear: Mapping[str, Shape], max_rank: int) -> int:
    """Return how large the weights file of an adapter of this rank may be."""
    return _MOST_HEADER_BYTES + num_elements(linear, max_rank) * 4


def num_elements(linear: Mapping[str, Shape], max_rank: int) -> int:
    """Return the elements of an adapter that changes all modules with this rank."""
    return max_rank * sum(rows + width for rows, width in linear.values())


def read_low_rank(
    files: AdapterFiles, linear: Mapping[str, Shape], others: Iterable[str], *, max_rank: int, dtype: torch.dtype
) -> dict[str, LowRank]:
    """Return the matrices of every module that the adapter changes, in this dtype.

    `linear` are the modules that may be changed, `others` those that may not. Raises ValueError naming the entry,
    module or tensor that is wrong or not supported.
    """
    config = parse_peft_config(files.config)
    stored = {tensor.name: tensor for tensor in parse_header(files.weights, Path(WEIGHTS), most=_MOST_HEADER_BYTES)}
    targeted = [module for module in linear if config.has(module)]
    _check_names(stored, linear, set(others), targeted)
    if not targeted:
        raise ValueError("adapter_config.json: target_modules matches no module of this model")
    return {module: _read(files, stored, config, module, linear[module], max_rank, dtype) for module in targeted}


def _check_names(
    stored: Mapping[str, StoredTensor], linear: Mapping[str, Shape], others: set[str], targeted: list[str]
) -> None:
    expected = {_PREFIX + module + end for module in targeted for end in (_A, _B)}
    for name in sorted(stored.keys() - expected):
        module, dot, _ = name.removeprefix(_PREFIX).rpartition(".lora_")
        if dot and module in others:
            raise ValueError(f"adapters of {module} are not supported: only linear layers outside of experts are")
        if dot and module in linear and name.endswith((_A, _B)):
            raise ValueError(f"tensor {name} is for a module that adapter_config.json does not target")
        raise ValueError(f"tensor {name} is not a matrix of a low-rank adapter of this model")


def _read(
    files: AdapterFiles,
    stored: Mapping[str, StoredTensor],
    config: PeftConfig,
    module: str,
    shape: Shape,
    max_rank: int,
    dtype: torch.dtype,
) -> LowRank:
    rank, scale = config.rank(module), config.scale(module)
    if rank > max_rank:
        raise ValueError(f"{module} has rank {rank}, at most {max_rank} is allowed (--max-lora-rank)")
    a_RI = _tensor(files, stored, _PREFIX + module + _A, (rank, shape[1]), 1.0, dtype)
    return LowRank(a_RI, _tensor(files, stored, _PREFIX + module + _B, (shape[0], rank), scale, dtype))


def _tensor(
    files: AdapterFiles,
    stored: Mapping[str, StoredTensor],
    name: str,
    shape: Shape,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a new tensor, multiplied by the scale in float32."""
    tensor = stored.get(name)
    if tensor is None:
        raise ValueError(f"{WEIGHTS} lacks tensor {name}, which adapter_config.json implies")
    if tensor.shape != shape:
        raise ValueError(f"tensor {name} has shape {tensor.shape}, adapter_config.json and the model say {shape}")
    if tensor.dtype not in STORED_DTYPES:
        raise ValueError(f"tensor {name} is stored as {tensor.dtype}; supported are {', '.join(STORED_DTYPES)}")
    raw = torch.frombuffer(files.weights[tensor.start : tensor.end], dtype=STORED_DTYPES[tensor.dtype])
    read = raw.to(torch.float32, copy=True).view(shape)
    if not bool(read.isfinite().all()):
        raise ValueError(f"tensor {name} has a value that is not finite")
    rounded = read.mul_(scale).to(dtype)
    if not bool(rounded.isfinite().all()):
        said = str(dtype).removeprefix("torch.")
        raise ValueError(f"tensor {name} is not finite after multiplying it by {scale:.6g} in {said}")
    return rounded


def combine(parts: Iterable[Part], matrices: Mapping[str, LowRank]) -> LowRank | None:
    """Return the matrices of a product of these parts, None if none of them is changed.

    A's are stacked; each part's rows of B are zero where they meet the A of another.
    """
    parts = tuple(parts)
    found = [(part, matrices.get(part.module)) for part in parts]
    changed = [low for _, low in found if low is not None]
    if not changed:
        return None
    if len(parts) == 1:
        return changed[0]
    b_OR = changed[0].b_OR.new_zeros(sum(part.rows for part in parts), sum(low.rank for low in changed))
    row = column = 0
    for part, low in found:
        if low is not None:
            b_OR[row : row + part.rows, column : column + low.rank] = low.b_OR
            column += low.rank
        row += part.rows
    return LowRank(torch.cat([low.a_RI for low in changed]), b_OR)
