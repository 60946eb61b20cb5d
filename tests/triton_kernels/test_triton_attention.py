"""Paged attention of the Triton kernels in the interpreter, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.triton_kernels.interpreter import SMALL
from tests.triton_kernels.passes import BLOCK_SIZE, Cache, Shape, make_batch, make_ops

SCALE = 0.3


def plain(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, position: int, *, window: int | None = None,
    in_chunks: bool = False, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention of the last tokens of one sequence over dense keys, computed by definition."""
    group = q_NHE.shape[1] // k_NKE.shape[1]
    k_NHE, v_NHE = k_NKE.repeat_interleave(group, 1), v_NKE.repeat_interleave(group, 1)
    score = torch.einsum("nhe,mhe->hnm", q_NHE, k_NHE) * SCALE
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    at, key = position + torch.arange(q_NHE.shape[0])[:, None], torch.arange(k_NKE.shape[0])[None]
    hidden = key > at
    if window is not None:
        hidden |= (key < at // window * window) if in_chunks else (key <= at - window)
    score = score.masked_fill(hidden, -torch.inf)
    if sinks_H is not None:
        score = torch.cat([score, sinks_H[:, None, None].expand(-1, len(at), 1)], -1)
    return torch.einsum("hnm,mhe->nhe", score.softmax(-1)[..., : len(v_NHE)], v_NHE)


class Sequence:
    """Keys, values and queries of one sequence, and blocks to hold them."""

    def __init__(self, length: int, shape: Shape, blocks: list[int], seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        self.q_NHE = torch.randn(length, shape.num_heads, shape.head_dim, generator=make)
        self.k_NKE = torch.randn(length, shape.num_kv_heads, shape.head_dim, generator=make)
        self.v_NKE = torch.randn(length, shape.num_kv_heads, shape.head_dim, generator=make)
        self.blocks = blocks
        self.length = length

    def store(self, cache: Cache) -> None:
        for position in range(self.length):
            block, slot = self.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            cache.pair[0][block, :, slot] = self.k_NKE[position]
            cache.pair[1][block, :, slot] = self.v_NKE[position]


def attend(
    sequences: list[tuple[Sequence, int, int]],
    shape: Shape,
    *,
    tiles: Any = SMALL,
    padding: int = 0,
    **options: Any,
) -> list[torch.Tensor]:
    """Return the attention of each row (sequence, first position, length)."""
    cache = Cache(shape.num_kv_heads, shape.head_dim)
    for sequence, _, _ in sequences:
        sequence.store(cache)
    rows = [{"length": n, "position": p, "blocks": s.blocks} for s, p, n in sequences]
    ops = make_ops(make_batch(*rows), cache, shape, tiles=tiles, padding=padding)
    q_NHE = torch.cat([s.q_NHE[p : p + n] for s, p, n in sequences])
    q_NHE = torch.cat([q_NHE, torch.randn(padding, *q_NHE.shape[1:])])
    o_NHE = ops.attend(0, q_NHE, scale=SCALE, **options)
    return list(o_NHE[: len(o_NHE) - padding].split([n for _, _, n in sequences]))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(), {}),
        (Shape(num_heads=6, head_dim=24), {}),
        (Shape(), {"window": 7}),
        (Shape(), {"window": 7, "in_chunks": True}),
        (Shape(), {"soft_cap": 2.0}),
        (Shape(num_heads=2), {"window": 20, "soft_cap": 5.0}),
        (Shape(num_heads=6, head_dim=24), {"window": 7, "sinks_H": torch.tensor([3.0, -2.0, 0.0, 1.0, -30.0, 30.0])}),
    ],
)
def test_attention(shape: Shape, options: dict[str, Any]) -> None:
    """Match plain torch for decoding rows, a prompt and a chunk after a cached prefix, in one pass."""
    rows = [
        (Sequence(38, shape, [3, 9, 1, 4, 22, 6, 7, 8, 5, 11], 1), 37, 1),
        (Sequence(13, shape, [12, 20, 13, 14], 2), 0, 13),
        (Sequence(29, shape, [15, 16, 30, 17, 18, 19, 10, 21], 3), 9, 11),
        (Sequence(3, shape, [2], 4), 2, 1),
    ]
    for (sequence, position, length), ours in zip(rows, attend(rows, shape, padding=2, **options), strict=True):
        end = position + length
        theirs = plain(sequence.q_NHE[position:end], sequence.k_NKE[:end], sequence.v_NKE[:end], position, **options)
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)
