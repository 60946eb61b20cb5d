"""Paged causal attention in fixed tiles, one sequence at a time: decode, prefill and chunks are the same arithmetic.

`ops.py` is the only caller. Queries and keys lie on grids over absolute positions (`tiles.py`). A query's result is
its chunks of keys, from the first to the one it stands in, combined in that order with a running maximum and sum
(online softmax: Milakov and Gimelshein, arXiv:1805.02867), all in float32.

What must always hold: the query at position p sits in row p % QUERIES of a product whose shape never varies, against
whole chunks whose missing keys are zeros. Nothing then depends on how the sequence was cut, batched or placed; other
rows of the tile, padding among them, can only spoil themselves.
"""

from __future__ import annotations

import torch

from quipu.kernels.reference.plan import Span
from quipu.kernels.reference.tiles import KEYS, QUERIES, round_up

# For the tile that starts at the i-th multiple of QUERIES within its last chunk: the keys after each of its queries.
_HIDDEN = torch.arange(KEYS) > torch.arange(KEYS).view(-1, QUERIES, 1)


def attend_span(q_nHE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, span: Span) -> torch.Tensor:
    """Attention of one row's queries to its sequence, whose KV has been written: o_nHE."""
    num_kv_heads, head_dim = k_BKSE.shape[1], k_BKSE.shape[3]
    context = span.position + span.length
    grid_start = span.position // QUERIES * QUERIES
    num_tiles = (round_up(context, QUERIES) - grid_start) // QUERIES
    lead = span.position - grid_start

    q_THE = q_nHE.new_zeros((num_tiles * QUERIES, *q_nHE.shape[1:]))
    q_THE[lead : lead + span.length] = q_nHE
    q_THE *= head_dim**-0.5
    # The G query heads that share a key/value head become more rows, Q = G * QUERIES, of one product.
    q_TKGE = q_THE.view(num_tiles, QUERIES, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    q_TKQE = q_TKGE.reshape(num_tiles, num_kv_heads, -1, head_dim)
    tiles = [_Tile(q_KQE, grid_start + index * QUERIES) for index, q_KQE in enumerate(q_TKQE)]

    for chunk_start in range(0, context, KEYS):
        k_KCE = _gather(k_BKSE, span.blocks, chunk_start, context)
        v_KCE = _gather(v_BKSE, span.blocks, chunk_start, context)
        for tile in tiles:
            if tile.position >= chunk_start:
                tile.add_chunk(k_KCE, v_KCE, chunk_start)

    o_TKQE = torch.stack([tile.result() for tile in tiles])
    o_THE = o_TKQE.view(num_tiles, num_kv_heads, -1, QUERIES, head_dim).permute(0, 3, 1, 2, 4).reshape(q_THE.shape)
    return o_THE[lead : lead + span.length]


class _Tile:
    """`QUERIES` positions from `position`, and the softmax of the chunks that they have met."""

    def __init__(self, q_KQE: torch.Tensor, position: int) -> None:
        self.position = position
        self._q_KQE = q_KQE
        self._maximum_KQ1 = q_KQE.new_full((*q_KQE.shape[:2], 1), -torch.inf)
        self._sum_KQ1 = torch.zeros_like(self._maximum_KQ1)
        self._weighted_KQE = torch.zeros_like(q_KQE)

    def add_chunk(self, k_KCE: torch.Tensor, v_KCE: torch.Tensor, chunk_start: int) -> None:
        s_KQC = torch.bmm(self._q_KQE, k_KCE.transpose(1, 2))
        if chunk_start + KEYS > self.position:
            # Fill, never add: a masked score may be NaN.
            hidden_QC = _HIDDEN[(self.position - chunk_start) // QUERIES]
            s_KQC.view(s_KQC.shape[0], -1, QUERIES, KEYS).masked_fill_(hidden_QC, -torch.inf)
        maximum_KQ1 = torch.maximum(self._maximum_KQ1, s_KQC.amax(-1, keepdim=True))
        p_KQC = torch.exp(s_KQC - maximum_KQ1)
        kept_KQ1 = torch.exp(self._maximum_KQ1 - maximum_KQ1)
        self._sum_KQ1 = self._sum_KQ1 * kept_KQ1 + p_KQC.sum(-1, keepdim=True)
        self._weighted_KQE = self._weighted_KQE * kept_KQ1 + torch.bmm(p_KQC, v_KCE)
        self._maximum_KQ1 = maximum_KQ1

    def result(self) -> torch.Tensor:
        return self._weighted_KQE / self._sum_KQ1


def _gather(cache_BKSE: torch.Tensor, blocks: torch.Tensor, chunk_start: int, context: int) -> torch.Tensor:
    """Keys or values of one chunk in float32, `[kv heads, KEYS, head_dim]`, zero past the context.

    Zero, because a masked key still meets its value: a weight of 0 times what stands in an unwritten slot may be NaN.
    Only the blocks that hold the chunk are read.
    """
    num_kv_heads, block_size, head_dim = cache_BKSE.shape[1:]
    chunk_end = min(chunk_start + KEYS, context)
    first = chunk_start // block_size
    held_BKSE = cache_BKSE[blocks[first : (chunk_end - 1) // block_size + 1]]
    held_KCE = held_BKSE.transpose(0, 1).flatten(1, 2)
    chunk_KCE = cache_BKSE.new_zeros((num_kv_heads, KEYS, head_dim), dtype=torch.float32)
    skipped = chunk_start - first * block_size
    chunk_KCE[:, : chunk_end - chunk_start] = held_KCE[:, skipped : skipped + chunk_end - chunk_start]
    return chunk_KCE
