"""Reading checkpoints with weights in FP8 and one scale for each block, as Qwen and DeepSeek publish them.

`formats.py` calls `read_fp8` for `quant_method: fp8`. A module `X` has `X.weight` in e4m3, and `X.weight_scale_inv`, a
factor for each block of 128 rows and 128 inputs. No kernel here multiplies FP8, so these are plain matrices once read:
rounded to the model's dtype, or quantized to int8 with `--quantization`.

What must always hold: a weight is its e4m3 number times its block's factor, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .files import STORED_DTYPES, MappedFiles, StoredTensor
from .stored_matrices import StoredMatrix


@attrs.frozen
class Fp8Matrix:
    """Implements `StoredMatrix`."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]

    layout = None
    format = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def stored(self) -> Sequence[StoredTensor]:
        return [self.weight, self.scale]

    def rows(self, files: MappedFiles, first: int, count: int) -> torch.Tensor:
        block_rows, block_width = self.block
        weight_OI = files.rows(self.weight, first, count).float()
        files.drop(self.weight, first * self.shape[1], count * self.shape[1])
        factors_BG = files.rows(self.scale, 0, self.scale.shape[0]).float()
        factors_OG = factors_BG[torch.arange(first, first + count) // block_rows]
        weight_OI *= factors_OG.repeat_interleave(block_width, dim=1)[:, : self.shape[1]]
        return weight_OI


def read_fp8(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, StoredMatrix]:
    """Return the matrices in FP8 by name. Raises ValueError naming what is not supported."""
    for entry, allowed in (("fmt", ("e4m3", None)), ("activation_scheme", ("dynamic", None))):
        if config.get(entry) not in allowed:
            raise ValueError(
                f"config.json: quantization_config.{entry} {config[entry]!r} is not supported, only {allowed[0]!r}"
            )
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(one, int) and one > 0 for one in block):
        raise ValueError(f"config.json: quantization_config.weight_block_size {block!r} is not supported, only a pair")
    found: dict[str, StoredMatrix] = {}
    for name, weight in stored.items():
        if weight.dtype != "F8_E4M3":
            continue
        scale = stored.get(f"{name}_scale_inv")
        if scale is None:
            raise ValueError(f"checkpoint lacks tensor {name}_scale_inv")
        blocks = tuple(-(-size // by) for size, by in zip(weight.shape, block, strict=False))
        if len(weight.shape) != 2 or scale.shape != blocks or scale.dtype not in STORED_DTYPES:
            raise ValueError(f"tensor {scale.name} has shape {scale.shape} of {scale.dtype}, must be {blocks} floats")
        rows, width = (max(1, min(by, size)) for by, size in zip(block, weight.shape, strict=True))
        found[name] = Fp8Matrix(weight, scale, (rows, width))
    return found
