"""Launch the attention kernels over one pass's columns; allocate the memory for decode's partial results."""

from __future__ import annotations

import attrs
import torch

import triton

from .columns import Columns
from .configs import Launch, Tiles
from .decode import decode_chunks_kernel, decode_sum_kernel
from .device import Device
from .prefill import prefill_kernel


class Parts:
    """Partial results of decode: weighted values, maximum and sum of every item, which the second kernel combines."""

    def __init__(self, num_items: int, num_heads: int, head_dim: int, device: Device) -> None:
        self.num_items = num_items
        self.weighted = device.empty((num_items, num_heads, head_dim), torch.float32)
        self.highest = device.empty((num_items, num_heads), torch.float32)
        self.total = device.empty((num_items, num_heads), torch.float32)


def attend(
    q_NHE: torch.Tensor,
    k_BKSE: torch.Tensor,
    v_BKSE: torch.Tensor,
    columns: Columns,
    tables: torch.Tensor,
    parts: Parts,
    tiles: Tiles,
    *,
    scale: float,
    window: int | None,
    in_chunks: bool,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of every token of the pass to its own sequence: o_NHE, zero for padding.

    `tables` has one block table per slot.
    """
    num_heads, head_dim = q_NHE.shape[1:]
    num_kv_heads, slots = k_BKSE.shape[1:3]
    group = num_heads // num_kv_heads
    c = columns.device
    # where every row has one token, decode_sum_kernel writes the zeros of padding rows
    o_NHE = torch.zeros_like(q_NHE) if columns.num_tiles else torch.empty_like(q_NHE)
    launch = decode_launch(tiles, group)
    strides = (tables.stride(0), k_BKSE.stride(0), k_BKSE.stride(1), k_BKSE.stride(2))
    numbers = (scale, 1.0 if soft_cap is None else soft_cap)
    meaning = (soft_cap is not None, window or 0, in_chunks, slots, num_kv_heads, group)
    sinks, has_sinks = q_NHE if sinks_H is None else sinks_H, sinks_H is not None
    width = (head_dim, max(16, triton.next_power_of_2(head_dim)))
    if columns.num_items:
        programs = max(1, tiles.programs // num_kv_heads)
        decode_chunks_kernel[(programs, num_kv_heads)](
            q_NHE, k_BKSE, v_BKSE, tables, c["row_slots"], c["row_tokens"], c["positions"], c["items"],
            c["num_items"], parts.weighted, parts.highest, parts.total, *strides, *numbers, *meaning,
            launch.rows, *width, tiles.keys, tiles.chunk, programs, **_options(launch, tiles),
        )  # fmt: skip
        decode_sum_kernel[(columns.capacity.num_rows, num_kv_heads)](
            parts.weighted, parts.highest, parts.total, c["row_tokens"], c["row_ends"], c["item_start"], o_NHE,
            sinks, has_sinks, num_kv_heads, group, launch.rows, *width, num_warps=launch.num_warps,
            enable_fp_fusion=tiles.fusion,
        )  # fmt: skip
    if columns.num_tiles:
        launch = prefill_launch(tiles, group, head_dim)
        prefill_kernel[(columns.num_tiles, num_kv_heads)](
            q_NHE, k_BKSE, v_BKSE, tables, c["row_slots"], c["row_tokens"], c["row_ends"], c["positions"],
            c["tiles"], o_NHE, sinks, *strides, *numbers, columns.tile, has_sinks, *meaning, launch.rows, *width,
            tiles.keys, tiles.chunk, **_options(launch, tiles),
        )  # fmt: skip
    return o_NHE


def decode_launch(tiles: Tiles, group: int) -> Launch:
    """Return decode's launch; the query heads of one token and one group fill the first rows of a tile."""
    return attrs.evolve(tiles.decode, rows=max(tiles.decode.rows, triton.next_power_of_2(group)))


def prefill_launch(tiles: Tiles, group: int, head_dim: int) -> Launch:
    """Return prefill's launch; a tile has room for at least one token's group."""
    launch = tiles.prefill if head_dim <= 128 else tiles.prefill_wide
    return attrs.evolve(launch, rows=max(launch.rows, triton.next_power_of_2(group)))


def tile_tokens(tiles: Tiles, group: int, head_dim: int) -> int:
    """Return how many tokens of a prompt one prefill program handles."""
    return prefill_launch(tiles, group, head_dim).rows // group


def _options(launch: Launch, tiles: Tiles) -> dict[str, int | bool]:
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": tiles.fusion}
