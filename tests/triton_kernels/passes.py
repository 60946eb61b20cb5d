"""Make a pass's columns and memory for tests of single operations; every unwritten slot is NaN."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from quipu.kernels.batch import StepBatch
from quipu.kernels.triton.attention import Parts, tile_tokens
from quipu.kernels.triton.columns import Capacity, Columns, lengths_of
from quipu.kernels.triton.configs import Tiles
from quipu.kernels.triton.matrices import LibraryLinear
from quipu.kernels.triton.memory import Memory, RopeTables
from quipu.kernels.triton.mixture import Addresses
from quipu.kernels.triton.ops import TritonOps
from tests.triton_kernels.interpreter import SMALL, CpuDevice

BLOCK_SIZE = 4
NUM_BLOCKS = 32
MAX_BLOCKS = 16


class Cache:
    """The cache of one layer, with the interface that operations use."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        shape = (NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim)
        self.pair = torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pair


@attrs.frozen
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16


def make_batch(*rows: dict[str, Any]) -> StepBatch:
    """Make a batch from rows of `length`, `position` and `blocks`; all sample greedily."""
    start = [0]
    for row in rows:
        start.append(start[-1] + row["length"])
    count = len(rows)
    return StepBatch(
        slots=[row.get("slot", index) for index, row in enumerate(rows)],
        query_start=start,
        positions=[row["position"] for row in rows],
        token_ids=list(range(start[-1])),
        block_tables=[row["blocks"] for row in rows],
        samples=[True] * count,
    )


def make_ops(
    batch: StepBatch, cache: Cache, shape: Shape, *, tiles: Tiles = SMALL, padding: int = 0, results: Any = None
) -> TritonOps:
    """Make operations for one batch, padded by `padding` tokens and rows."""
    device = CpuDevice()
    group = shape.num_heads // shape.num_kv_heads
    capacity = Capacity(
        num_tokens=len(batch.token_ids) + padding, num_rows=len(batch.slots) + padding, num_tiles=64, num_items=64
    )
    tables = np.zeros((8, MAX_BLOCKS), dtype=np.int32)
    for slot, blocks in zip(batch.slots, batch.block_tables, strict=True):
        tables[slot, : len(blocks)] = blocks
    lengths = lengths_of(batch)
    columns = Columns(capacity, device)
    columns.fill(
        batch, lengths, tables, block_size=BLOCK_SIZE, chunk=tiles.chunk, tile=tile_tokens(tiles, group, shape.head_dim)
    )
    memory = Memory(
        cache=cache,
        tables=torch.from_numpy(tables),
        parts=Parts(capacity.num_items, shape.num_heads, shape.head_dim, device),
        rope_tables=RopeTables(device.torch_device),
        addresses=Addresses(device.torch_device),
    )
    return TritonOps(columns, memory, tiles, results or LibraryLinear())
