"""Paged causal attention in fixed tiles, one sequence at a time: decode, prefill and chunks use the same arithmetic.

Queries and keys lie on grids over absolute positions (`rows.py`). A query's chunks of keys, from the first to its own,
are combined in ascending order with a running maximum and sum (online softmax: Milakov and Gimelshein,
arXiv:1805.02867), all in float32.

What must always hold: the query at position p is row p % QUERIES of a product of constant shape, against whole chunks
in which missing keys are zeros; the chunks of its tile follow from p and the window. So the result does not depend on
chunking, batching or placement, and rows of a tile, including padding, do not affect each other.
"""

from __future__ import annotations

import attrs
import torch

from .kv_slots import Slots
from .plan import Span
from .rows import KEYS, QUERIES, round_up

# Distance from each key of a chunk at position 0 to each query of a tile at position 0.
_QUERY_Q1, _KEY_C = torch.arange(QUERIES).view(-1, 1), torch.arange(KEYS)
_DISTANCE_QC = _QUERY_Q1 - _KEY_C


@attrs.frozen
class Scores:
    """How scores are computed from products of queries and keys; see `Ops.attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks_H: torch.Tensor | None = None
    in_chunks: bool = False

    def first_key(self, position: int) -> int:
        """Return the first key that a token sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.in_chunks else max(0, position - self.window + 1)


def attend_span(q_nHE: torch.Tensor, k_slots: Slots, v_slots: Slots, span: Span, scores: Scores) -> torch.Tensor:
    """Compute attention of one row's queries to its sequence, whose KV has been written: o_nHE."""
    num_kv_heads, head_dim = k_slots.num_kv_heads, q_nHE.shape[2]
    context = span.position + span.length
    grid_start = span.position // QUERIES * QUERIES
    num_tiles = (round_up(context, QUERIES) - grid_start) // QUERIES
    lead = span.position - grid_start

    q_THE = q_nHE.new_zeros((num_tiles * QUERIES, *q_nHE.shape[1:]))
    q_THE[lead : lead + span.length] = q_nHE
    q_THE *= scores.scale
    # The G query heads that share a key/value head become rows of one product, Q = G * QUERIES.
    q_TKGE = q_THE.view(num_tiles, QUERIES, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    q_TKQE = q_TKGE.reshape(num_tiles, num_kv_heads, -1, head_dim)
    tiles = [_Tile(q_KQE, grid_start + index * QUERIES, scores) for index, q_KQE in enumerate(q_TKQE)]

    for chunk_start in range(tiles[0].first_key // KEYS * KEYS, context, KEYS):
        k_KCE = _gather(k_slots, span.blocks, chunk_start, context)
        v_KCE = _gather(v_slots, span.blocks, chunk_start, context)
        for tile in tiles:
            if tile.first_key < chunk_start + KEYS and tile.position >= chunk_start:
                tile.add_chunk(k_KCE, v_KCE, chunk_start)

    o_TKQE = torch.stack([tile.result() for tile in tiles])
    o_THE = o_TKQE.view(num_tiles, num_kv_heads, -1, QUERIES, head_dim).permute(0, 3, 1, 2, 4).reshape(q_THE.shape)
    return o_THE[lead : lead + span.length]


class _Tile:
    """`QUERIES` positions from `position`, and their softmax over the chunks added so far."""

    def __init__(self, q_KQE: torch.Tensor, position: int, scores: Scores) -> None:
        self.position = position
        self.first_key = scores.first_key(position)
        """The first key that any query of the tile sees."""
        self._scores = scores
        self._q_KQE = q_KQE
        self._maximum_KQ1 = q_KQE.new_full((*q_KQE.shape[:2], 1), -torch.inf)
        self._sum_KQ1 = torch.zeros_like(self._maximum_KQ1)
        if scores.sinks_H is not None:  # as if a key had been seen whose value is 0
            self._maximum_KQ1 = scores.sinks_H.repeat_interleave(QUERIES).view(self._maximum_KQ1.shape)
            self._sum_KQ1 = torch.ones_like(self._maximum_KQ1)
        self._weighted_KQE = torch.zeros_like(q_KQE)

    def add_chunk(self, k_KCE: torch.Tensor, v_KCE: torch.Tensor, chunk_start: int) -> None:
        s_KQC = torch.bmm(self._q_KQE, k_KCE.transpose(1, 2))
        if self._scores.soft_cap is not None:
            s_KQC = torch.tanh(s_KQC / self._scores.soft_cap) * self._scores.soft_cap
        hidden_QC = self._hidden(chunk_start)
        if hidden_QC is not None:
            # Fill, never add: a masked score may be NaN.
            s_KQC.view(s_KQC.shape[0], -1, QUERIES, KEYS).masked_fill_(hidden_QC, -torch.inf)
        maximum_KQ1 = torch.maximum(self._maximum_KQ1, s_KQC.amax(-1, keepdim=True))
        # A query that has seen no key yet is unchanged: its weights are exp(-inf - 0).
        finite_KQ1 = maximum_KQ1.masked_fill(maximum_KQ1 == -torch.inf, 0.0)
        p_KQC = torch.exp(s_KQC - finite_KQ1)
        kept_KQ1 = torch.exp(self._maximum_KQ1 - finite_KQ1)
        self._sum_KQ1 = self._sum_KQ1 * kept_KQ1 + p_KQC.sum(-1, keepdim=True)
        self._weighted_KQE = self._weighted_KQE * kept_KQ1 + torch.bmm(p_KQC, v_KCE)
        self._maximum_KQ1 = maximum_KQ1

    def _hidden(self, chunk_start: int) -> torch.Tensor | None:
        """Return the mask of keys that queries do not see; None if they see all."""
        distance, window = self.position - chunk_start, self._scores.window
        hidden_QC = _DISTANCE_QC + distance < 0 if distance < KEYS else None
        if window is not None and self._scores.in_chunks:
            too_far_QC = chunk_start + _KEY_C < (self.position + _QUERY_Q1) // window * window
        elif window is not None and distance + QUERIES > window:
            too_far_QC = _DISTANCE_QC + distance >= window
        else:
            return hidden_QC
        return too_far_QC if hidden_QC is None else hidden_QC | too_far_QC

    def result(self) -> torch.Tensor:
        return self._weighted_KQE / self._sum_KQ1


def _gather(slots: Slots, blocks: torch.Tensor, chunk_start: int, context: int) -> torch.Tensor:
    """Gather keys or values of one chunk in float32, `[kv heads, KEYS, head_dim]`, zero past the context.

    Zero, because a masked key is still multiplied with its value: a weight of 0 times an unwritten slot may be NaN.
    Only the blocks that contain the chunk are read.
    """
    block_size = slots.block_size
    chunk_end = min(chunk_start + KEYS, context)
    first = chunk_start // block_size
    held_BKSE = slots.read(blocks[first : (chunk_end - 1) // block_size + 1])
    held_KCE = held_BKSE.transpose(0, 1).flatten(1, 2)
    chunk_KCE = held_KCE.new_zeros((held_KCE.shape[0], KEYS, held_KCE.shape[2]))
    skipped = chunk_start - first * block_size
    chunk_KCE[:, : chunk_end - chunk_start] = held_KCE[:, skipped : skipped + chunk_end - chunk_start]
    return chunk_KCE
