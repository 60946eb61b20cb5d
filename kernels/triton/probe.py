"""Check at start, with random numbers, that this GPU keeps what strict mode promises.

(i) Does a row of a matrix product have the same bits whatever the number of rows? cuBLAS does not guarantee it; if it
fails, our own product is used, which is checked in the same way. (ii) Does a token get the same bits from the decode
kernel as from the prefill kernel, whose tensor-core instructions and layouts differ? If not, prefill uses decode's
tile: then both compile the same arithmetic, at the price of slower prompts.

What must always hold: the checks use what will be served: the same shapes and dtypes, every padded size of a pass, the
model's own windows and caps. Strict mode is refused if no choice of kernels passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ..backend import BackendConfig
from ..batch import StepBatch
from ..checkpoints.weights import Shape
from ..kv_cache import BlockShape, KVCache
from ..models.families import Model
from .attention import Parts
from .columns import Capacity, Columns, lengths_of
from .configs import Tiles, shared_tile, token_ladder
from .device import Device
from .matrices import LibraryLinear, Linear, OwnLinear
from .memory import Heads, Memory, RopeTables
from .mixture import Addresses
from .ops import TritonOps

_LARGEST_RESULT = 1 << 28
"""Elements. Larger products are checked with fewer rows than a pass may have (the head never has so many)."""


@attrs.frozen
class AttentionKind:
    """The parameters of a layer's attention."""

    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool = False
    heads: Heads | None = None
    """Of these layers; None: those of all."""
    in_chunks: bool = False


@attrs.frozen
class StrictKernels:
    """The kernels that passed the checks."""

    linear: Linear
    tiles: Tiles
    shared: bool
    """Prefill uses decode's tile."""

    def __str__(self) -> str:
        attention = "decode's tile" if self.shared else "its own tile"
        return f"matrix products by {self.linear.name}, prefill with {attention}"


def choose_strict_kernels(
    matrices: dict[Shape, torch.Tensor],
    kinds: Sequence[AttentionKind],
    heads: Heads,
    config: BackendConfig,
    device: Device,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    allow_cublas: bool,
) -> StrictKernels:
    """Return the fastest kernels that pass the checks. Raises ValueError if none do.

    `allow_cublas` is false if cuBLAS has been started without the environment that makes it deterministic.
    """
    ladder = token_ladder(max(config.max_num_batched_tokens, config.max_num_seqs))
    linears: list[Linear] = [LibraryLinear()] if allow_cublas else []
    linears.append(OwnLinear(tiles))
    linear = next((one for one in linears if _all_products_are_invariant(one, matrices, ladder)), None)
    if linear is None:
        raise ValueError(
            "determinism strict is not available: on this GPU a row of a matrix product depends on the number of rows"
        )
    for shared in (False, True):
        tried = shared_tile(tiles) if shared else tiles
        if all(attention_is_invariant(kind, heads, config.block_size, device, tried, dtype) for kind in kinds):
            return StrictKernels(linear, tried, shared)
    raise ValueError(
        "determinism strict is not available: on this GPU decode and prefill compute different bits for a token"
    )


def attention_kinds(
    model: Model, block: BlockShape, heads: Heads, device: Device, tiles: Tiles, dtype: torch.dtype
) -> list[AttentionKind]:
    """Return the distinct kinds of attention of a model's layers, found by running one token."""
    batch = same_blocks([(0, 0, 1)], [0])
    cache = KVCache(2, block, device.torch_device)
    columns, memory = make_pass(batch, block.num_layers, 2, heads, 16, device, tiles, dtype, cache)
    ops = _RecordingOps(columns, memory, tiles, LibraryLinear())
    ops.finish(model.forward(columns.device["token_ids"], ops))
    return list(dict.fromkeys(ops.kinds))


def products_are_invariant(linear: Linear, weight_OI: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the first and last rows of the largest product equal the products of those rows alone."""
    x_NI = torch.randn(sizes[-1], weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)
    whole_NO = linear(x_NI, weight_OI, None, dtype)
    return all(
        torch.equal(linear(x_NI[:size], weight_OI, None, dtype), whole_NO[:size])
        and torch.equal(linear(x_NI[-size:], weight_OI, None, dtype), whole_NO[-size:])
        for size in sizes
    )


def attention_is_invariant(
    kind: AttentionKind, heads: Heads, block_size: int, device: Device, tiles: Tiles, dtype: torch.dtype
) -> bool:
    """Return whether a sequence's tokens get the same bits as one prompt, as two, and as decodes of one batch."""
    tile = heads.tile_tokens(tiles)
    heads = kind.heads or heads
    context = 2 * tiles.chunk + tiles.chunk // 2 + 3
    length = min(tiles.chunk, tile + 3)
    blocks = list(range(1, 1 + -(-context // block_size)))
    first = context - length
    q_NHE = torch.randn(length, heads.num_heads, heads.head_dim, dtype=dtype, device=device.torch_device)
    cut = length // 3
    sinks_H = torch.randn(heads.num_heads, dtype=dtype, device=device.torch_device) if kind.has_sinks else None

    def attend(rows: list[tuple[int, int, int]], q_nHE: torch.Tensor, cache: KVCache) -> torch.Tensor:
        columns, memory = make_pass(
            same_blocks(rows, blocks), 1, len(blocks) + 1, heads, block_size, device, tiles, dtype, cache
        )  # fmt: skip
        ops = TritonOps(columns, memory, tiles, LibraryLinear())
        return ops.attend(
            0, q_nHE, scale=kind.scale, window=kind.window, in_chunks=kind.in_chunks, soft_cap=kind.soft_cap,
            sinks_H=sinks_H,
        )  # fmt: skip

    cache = _cache(1, len(blocks) + 1, heads, block_size, device, dtype)
    for tensor in cache[0]:
        tensor.normal_()
    whole = attend([(0, first, length)], q_NHE, cache)
    pieces = [
        attend([(0, first, cut)], q_NHE[:cut], cache),
        attend([(0, first + cut, length - cut)], q_NHE[cut:], cache),
    ]
    singly = attend([(row, first + row, 1) for row in range(length)], q_NHE, cache)
    return torch.equal(torch.cat(pieces), whole) and torch.equal(singly, whole)


class _RecordingOps(TritonOps):
    """Records the kinds of attention that a model asks for."""

    def __init__(self, columns: Columns, memory: Memory, tiles: Tiles, linear: Linear) -> None:
        super().__init__(columns, memory, tiles, linear)
        self.kinds: list[AttentionKind] = []

    def attend(
        self, layer: int, q_NHE: torch.Tensor, *, scale: float, window: int | None = None, in_chunks: bool = False,
        soft_cap: float | None = None, sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        num_kv_heads = self._memory.cache[layer][0].shape[1]
        heads = Heads(q_NHE.shape[1], num_kv_heads, q_NHE.shape[2])
        self.kinds.append(AttentionKind(scale, window, soft_cap, sinks_H is not None, heads, in_chunks))
        return super().attend(
            layer, q_NHE, scale=scale, window=window, in_chunks=in_chunks, soft_cap=soft_cap, sinks_H=sinks_H
        )


def _all_products_are_invariant(linear: Linear, matrices: dict[Shape, torch.Tensor], ladder: list[int]) -> bool:
    vocab_size = max(shape[0] for shape in matrices)
    for (num_out, _), weight_OI in matrices.items():
        sizes = [size for size in ladder if size * num_out <= _LARGEST_RESULT] or ladder[:1]
        # the head's results are float32, and any matrix of this size may be the head
        dtypes = {weight_OI.dtype, torch.float32} if num_out == vocab_size else {weight_OI.dtype}
        if not all(products_are_invariant(linear, weight_OI, sizes, dtype) for dtype in dtypes):
            return False
    return True


def _cache(
    num_layers: int, num_blocks: int, heads: Heads, block_size: int, device: Device, dtype: torch.dtype
) -> KVCache:
    shape = BlockShape(
        num_layers=num_layers, num_kv_heads=heads.num_kv_heads, block_size=block_size, head_dim=heads.head_dim,
        dtype=dtype,
    )  # fmt: skip
    return KVCache(num_blocks, shape, device.torch_device)


def make_pass(
    batch: StepBatch,
    num_layers: int,
    num_blocks: int,
    heads: Heads,
    block_size: int,
    device: Device,
    tiles: Tiles,
    dtype: torch.dtype,
    cache: KVCache | None = None,
) -> tuple[Columns, Memory]:
    """Make the columns of one pass, and memory of the size that they need."""
    num_rows, num_tokens = len(batch.slots), len(batch.token_ids)
    table = np.array(batch.block_tables, dtype=np.int32)
    num_items = sum(position // tiles.chunk + 1 for position in batch.positions)
    capacity = Capacity(num_tokens=num_tokens, num_rows=num_rows, num_tiles=num_tokens + num_rows, num_items=num_items)
    columns = Columns(capacity, device)
    tile = heads.tile_tokens(tiles)
    lengths = lengths_of(batch)
    columns.fill(batch, lengths, table, block_size=block_size, chunk=tiles.chunk, tile=tile)
    memory = Memory(
        cache=cache or _cache(num_layers, num_blocks, heads, block_size, device, dtype),
        tables=torch.from_numpy(table).to(device.torch_device),
        parts=Parts(num_items, heads.num_heads, heads.widest, device),
        rope_tables=RopeTables(device.torch_device),
        addresses=Addresses(device.torch_device),
    )
    return columns, memory


def same_blocks(rows: list[tuple[int, int, int]], blocks: list[int]) -> StepBatch:
    """Make a batch of rows (slot, first position, length) that share their blocks."""
    count = len(rows)
    start = np.concatenate(([0], np.cumsum([length for _, _, length in rows])))
    return StepBatch(
        slots=[slot for slot, _, _ in rows],
        query_start=[int(place) for place in start],
        positions=[position for _, position, _ in rows],
        token_ids=[0] * int(start[-1]),
        block_tables=[blocks] * count,
        samples=[False] * count,
    )
