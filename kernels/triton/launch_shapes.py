"""The grids and memory of launches over rows (`ops.py`)."""

from __future__ import annotations

import torch

import triton

_BLOCK = 1024


def place_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def dense_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rows_of(num_rows: int, width: int) -> tuple[int, int]:
    """Return the grid: one program for each block of each row."""
    return num_rows, triton.cdiv(width, block_of(width))


def block_of(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def warps_for(block: int) -> int:
    return max(1, min(16, block // 512))
