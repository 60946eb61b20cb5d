"""Random weights, determined by the tensor's name: the same in every run, whatever the pieces they are read in.

With a quantization, codes are drawn as they are: benchmarks would otherwise wait for numbers to be quantized that mean
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from .quantized import QuantizedLayout, QuantizedRows
from .quantizing import Quantization
from .sources import Shape
from .stored_matrices import layout_name

_STD = 0.02
# A prime: no row length divides it, so no two rows of a matrix are equal when the block is tiled.
_BLOCK = 65_537


class DummySource:
    """Implements `Source` of `sources.py` for benchmarks, which need shapes but no meaningful weights."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        self._dtype = dtype
        self._quantization = quantization
        self._shapes: dict[str, Shape] = {}

    def check(self, name: str, shape: Shape) -> None:
        self._shapes[name] = shape

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        if self.layout(name) is None:
            fill_dummy(name, first, out, self._dtype)
            return
        width = self._shapes[name][1]
        rows = self.rows(name, first // width, len(out) // width)
        out.copy_(rows.dequantized().view(-1).to(self._dtype))

    def layout(self, name: str) -> QuantizedLayout | None:
        return None if self._quantization is None else self._quantization.layout(name, self._shapes[name])

    def rows(self, name: str, first: int, count: int) -> QuantizedRows:
        layout, width = self.layout(name), self._shapes[name][1]
        assert layout is not None, "rows are asked for of quantized tensors only"
        num_groups = width // layout.group_size
        codes_OI = torch.empty(count, width, dtype=torch.int8)
        _tile(_codes(name, layout.bits), first * width, codes_OI.view(-1))
        scales_OG = torch.empty(count, num_groups)
        _tile(_scales(name, layout.bits), first * num_groups, scales_OG.view(-1))
        return QuantizedRows(codes_OI, scales_OG)

    def format(self, name: str) -> str:
        layout = self.layout(name)
        return str(self._dtype).removeprefix("torch.") if layout is None else layout_name(layout, self._shapes[name][1])

    def check_all_used(self, ignore: frozenset[str]) -> None:
        pass

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {}


def fill_dummy(name: str, first: int, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill `out`, which is flat, with elements of the named tensor from `first` on. Weights of norms, and
    factors of layers, are ones."""
    if name.endswith(("norm.weight", "layer_scalar")):
        out.fill_(1.0)
        return
    _tile(_block(name, dtype), first, out)


def _tile(block: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Fill `out` with a block that repeats, from element `first` on: drawing all numbers would take 20 times as long.

    Copied as bytes by numpy: torch starts threads for so few, which on a busy machine take ten times as long.
    """
    if block.dtype != out.dtype:
        block = block.to(out.dtype)
    source, target = (numbers.view(torch.uint8).numpy() for numbers in (block, out))
    at, start = 0, first % _BLOCK * out.itemsize
    while at < len(target):
        some = source[start : start + len(target) - at]
        target[at : at + len(some)] = some
        at, start = at + len(some), 0


@lru_cache(maxsize=4)
def _block(name: str, dtype: torch.dtype) -> torch.Tensor:
    drawn = _generator(name).standard_normal(_BLOCK, dtype=np.float32) * np.float32(_STD)
    return torch.from_numpy(drawn).to(dtype)


@lru_cache(maxsize=4)
def _codes(name: str, bits: int) -> torch.Tensor:
    top = 2 ** (bits - 1) - 1
    return torch.from_numpy(_generator(name).integers(-top, top, _BLOCK, dtype=np.int8, endpoint=True))


@lru_cache(maxsize=4)
def _scales(name: str, bits: int) -> torch.Tensor:
    """Return scales that give codes of `_codes` about the deviation of plain dummy weights; float16 holds them."""
    usual = _STD * 3**0.5 / (2 ** (bits - 1) - 1)
    return torch.from_numpy(_generator(name).uniform(0.5 * usual, 1.5 * usual, _BLOCK).astype(np.float16)).float()


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
