"""Random weights, determined by the tensor's name: the same in every run, whatever the pieces they are read in."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import attrs
import numpy as np
import torch

from .sources import Shape

_STD = 0.02
# A prime: no row length divides it, so no two rows of a matrix are equal when the block is tiled.
_BLOCK = 65_537


@attrs.frozen
class DummySource:
    """Implements `Source` of `sources.py` for benchmarks, which need shapes but no meaningful weights."""

    dtype: torch.dtype

    def check(self, name: str, shape: Shape) -> None:
        pass

    def copy(self, name: str, first: int, out: torch.Tensor) -> None:
        fill_dummy(name, first, out, self.dtype)

    def check_all_used(self, ignore: frozenset[str]) -> None:
        pass

    @property
    def num_elements(self) -> int:
        return 0


def fill_dummy(name: str, first: int, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill `out`, which is flat, with elements of the named tensor from `first` on, rounded to `dtype`.

    Weights of norms are ones.
    """
    if name.endswith("norm.weight"):
        out.fill_(1.0)
        return
    # Tiling one block fills memory at its full bandwidth; drawing all numbers would take twenty times as long.
    block = _block(name, dtype)
    at = 0
    while at < len(out):
        begin = (first + at) % _BLOCK
        some = block[begin : begin + len(out) - at]
        out[at : at + len(some)] = some
        at += len(some)


@lru_cache(maxsize=4)
def _block(name: str, dtype: torch.dtype) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    drawn = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32) * np.float32(_STD)
    return torch.from_numpy(drawn).to(dtype)
