"""The strict mode's two questions, put to the GPU at hand with random numbers before it serves.

(i) Are a row's bits in a matrix product the same however many rows there are? cuBLAS promises nothing; if the answer is
no, our own product runs, which is asked as well. (ii) Are a token's bits the same from the decode kernel as from the
prefill kernel, whose tensor-core instructions and layouts differ? If not, prefill takes decode's tile: then both
compile the same arithmetic, at the price of slower prompts.

What must always hold: what is served is what was asked about: the same shapes and dtypes, every padded size of a pass,
the model's own windows and caps. Strict is not claimed where an answer is no.
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
from .attention import Parts, tile_tokens
from .columns import Columns, Room, lengths_of
from .configs import Tiles, shared_tile, token_ladder
from .device import Device
from .matrices import LibraryLinear, Linear, OwnLinear
from .memory import Heads, Memory, RopeTables
from .mixture import Addresses
from .ops import TritonOps

_LARGEST_RESULT = 1 << 28
"""Numbers: larger products are asked about with fewer rows than a pass may have (the head never has so many)."""


@attrs.frozen
class AttentionKind:
    """What a layer asks of attention."""

    scale: float
    window: int | None
    soft_cap: float | None


@attrs.frozen
class Way:
    """How strict is kept here."""

    linear: Linear
    tiles: Tiles
    shared: bool
    """Prefill has decode's tile."""

    def __str__(self) -> str:
        attention = "decode's tile for prompts, too" if self.shared else "a tile of its own for prompts"
        return f"matrices by {self.linear.name}, {attention}"


def find_strict_way(
    matrices: dict[Shape, torch.Tensor],
    kinds: Sequence[AttentionKind],
    heads: Heads,
    config: BackendConfig,
    device: Device,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    library_may: bool,
) -> Way:
    """The fastest way whose answers are yes. Raises ValueError where there is none.

    `library_may` false leaves cuBLAS out: it was started without what its part takes.
    """
    ladder = token_ladder(max(config.max_num_batched_tokens, config.max_num_seqs))
    linears: list[Linear] = [LibraryLinear()] if library_may else []
    linears.append(OwnLinear(tiles))
    linear = next((way for way in linears if _all_products_alike(way, matrices, ladder)), None)
    if linear is None:
        raise ValueError("determinism strict: on this GPU a row of a matrix product depends on the number of rows")
    for shared in (False, True):
        tried = shared_tile(tiles) if shared else tiles
        if all(attention_alike(kind, heads, config.block_size, device, tried, dtype) for kind in kinds):
            return Way(linear, tried, shared)
    raise ValueError("determinism strict: on this GPU a decoded token differs from the same token in a prompt")


def attention_kinds(
    model: Model, num_layers: int, heads: Heads, device: Device, tiles: Tiles, dtype: torch.dtype
) -> list[AttentionKind]:
    """What a model's layers ask, from one token that it is fed."""
    batch = same_blocks([(0, 0, 1)], [0])
    columns, memory = make_pass(batch, num_layers, 2, heads, 16, device, tiles, dtype)
    ops = _Noting(columns, memory, tiles, LibraryLinear())
    ops.finish(model.forward(columns.device["token_ids"], ops))
    return list(dict.fromkeys(ops.kinds))


def products_alike(linear: Linear, weight_OI: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the first and the last rows of the largest product have the bits that they have by themselves."""
    x_NI = torch.randn(sizes[-1], weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)
    whole_NO = linear(x_NI, weight_OI, None, dtype)
    return all(
        torch.equal(linear(x_NI[:size], weight_OI, None, dtype), whole_NO[:size])
        and torch.equal(linear(x_NI[-size:], weight_OI, None, dtype), whole_NO[-size:])
        for size in sizes
    )


def attention_alike(
    kind: AttentionKind, heads: Heads, block_size: int, device: Device, tiles: Tiles, dtype: torch.dtype
) -> bool:
    """Whether tokens of one sequence have the same bits as a prompt, in two pieces, and one by one in a batch."""
    tile = tile_tokens(tiles, heads.num_heads // heads.num_kv_heads, heads.head_dim)
    context = 2 * tiles.chunk + tiles.chunk // 2 + 3
    length = min(tiles.chunk, tile + 3)
    blocks = list(range(1, 1 + -(-context // block_size)))
    first = context - length
    q_NHE = torch.randn(length, heads.num_heads, heads.head_dim, dtype=dtype, device=device.torch_device)
    cut = length // 3

    def attend(rows: list[tuple[int, int, int]], q_nHE: torch.Tensor, cache: KVCache) -> torch.Tensor:
        columns, memory = make_pass(
            same_blocks(rows, blocks), 1, len(blocks) + 1, heads, block_size, device, tiles, dtype, cache
        )  # fmt: skip
        ops = TritonOps(columns, memory, tiles, LibraryLinear())
        return ops.attend(0, q_nHE, scale=kind.scale, window=kind.window, soft_cap=kind.soft_cap)

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


class _Noting(TritonOps):
    """Remembers what attention is asked for."""

    def __init__(self, columns: Columns, memory: Memory, tiles: Tiles, linear: Linear) -> None:
        super().__init__(columns, memory, tiles, linear)
        self.kinds: list[AttentionKind] = []

    def attend(
        self, layer: int, q_NHE: torch.Tensor, *, scale: float, window: int | None = None, soft_cap: float | None = None
    ) -> torch.Tensor:
        self.kinds.append(AttentionKind(scale, window, soft_cap))
        return super().attend(layer, q_NHE, scale=scale, window=window, soft_cap=soft_cap)


def _all_products_alike(linear: Linear, matrices: dict[Shape, torch.Tensor], ladder: list[int]) -> bool:
    vocab_size = max(shape[0] for shape in matrices)
    for (num_out, _), weight_OI in matrices.items():
        sizes = [size for size in ladder if size * num_out <= _LARGEST_RESULT] or ladder[:1]
        # a head's results are float32; which of the matrices is the head is not said here
        dtypes = {weight_OI.dtype, torch.float32} if num_out == vocab_size else {weight_OI.dtype}
        if not all(products_alike(linear, weight_OI, sizes, dtype) for dtype in dtypes):
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
    """One pass's columns, and memory as large as they need."""
    num_rows, num_tokens = len(batch.slots), len(batch.token_ids)
    table = np.array(batch.block_tables, dtype=np.int32)
    num_items = sum(position // tiles.chunk + 1 for position in batch.positions)
    room = Room(num_tokens=num_tokens, num_rows=num_rows, num_tiles=num_tokens + num_rows, num_items=num_items)
    columns = Columns(room, device)
    tile = tile_tokens(tiles, heads.num_heads // heads.num_kv_heads, heads.head_dim)
    lengths = lengths_of(batch)
    columns.fill(batch, lengths, table, block_size=block_size, chunk=tiles.chunk, tile=tile)
    memory = Memory(
        cache=cache or _cache(num_layers, num_blocks, heads, block_size, device, dtype),
        tables=torch.from_numpy(table).to(device.torch_device),
        parts=Parts(num_items, heads.num_heads, heads.head_dim, device),
        rope_tables=RopeTables(device.torch_device),
        addresses=Addresses(device.torch_device),
    )
    return columns, memory


def same_blocks(rows: list[tuple[int, int, int]], blocks: list[int]) -> StepBatch:
    """Rows of (slot, first position, length) over the same blocks."""
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
