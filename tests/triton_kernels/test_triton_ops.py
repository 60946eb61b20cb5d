"""Single operations in the interpreter, and that fusing deferred launches does not change results."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from quipu.kernels.kv_cache import KVCache
from quipu.kernels.ops import Choice, Experts
from quipu.kernels.reference.ops import ReferenceOps
from quipu.kernels.reference.plan import make_plan
from quipu.kernels.triton.ops import TritonOps
from tests.triton_kernels.passes import BLOCK_SIZE, Cache, Shape, make_batch, make_ops

SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=16)
BATCH = make_batch(
    {"length": 3, "position": 2, "blocks": [4, 7], "slot": 1}, {"length": 1, "position": 5, "blocks": [2, 9], "slot": 0}
)
TOKENS = 4


class Table:
    """A rotary table for part of a head."""

    def __init__(self, half: int) -> None:
        angle_PR = torch.outer(torch.arange(32.0), 0.3 ** torch.arange(half))
        self.cos_PR, self.sin_PR, self.is_interleaved = angle_PR.cos(), angle_PR.sin(), False

    def at(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos_PR[positions_N], self.sin_PR[positions_N]


def both() -> tuple[TritonOps, ReferenceOps, Cache]:
    cache = Cache(SHAPE.num_kv_heads, SHAPE.head_dim)
    reference: Any = ReferenceOps(make_plan(BATCH, [None] * 8, BLOCK_SIZE), KVCache.__new__(KVCache), torch.float32)
    return make_ops(BATCH, cache, SHAPE), reference, cache


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs[: len(ours)], atol=2e-6, rtol=1e-5)


# numpy warns; the resulting limit is intended
overflows = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


@overflows
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated(name: str) -> None:
    """Match the reference, with large arguments whose exponentials overflow or underflow too."""
    ours, theirs, _ = both()
    gate_up = torch.randn(TOKENS, 2 * 40) * torch.tensor([1.0, 10.0, 100.0, 3.0])[:, None]
    close(getattr(ours, name)(gate_up), getattr(theirs, name)(gate_up))


@overflows
def test_soft_cap_and_embed() -> None:
    """Match the reference far beyond the cap; scale the rows of an embedding, some of them repeated or beyond it."""
    ours, theirs, _ = both()
    x, table = torch.randn(TOKENS, 50) * 300, torch.randn(9, 24)
    close(ours.soft_cap(x, 5.0), theirs.soft_cap(x, 5.0))
    ids = torch.tensor([3, 8, 0, 3], dtype=torch.int32)
    close(ours.embed(ids, table, 1.7), table[ids.long()] * 1.7)
    close(ours.embed(torch.tensor([8, 9, 200], dtype=torch.int32), table), table[[8, 0, 0]])
    half = ours.embed(ids, table.half(), 1.7)
    close(half, table.half()[ids.long()] * torch.tensor(1.7, dtype=torch.half))


@overflows
def test_sparse_gates() -> None:
    """Match the reference: each row has a cutoff of its own."""
    ours, theirs, _ = both()
    gate_up = torch.randn(TOKENS, 2 * 40) * torch.tensor([1.0, 10.0, 100.0, 3.0])[:, None] + 2
    for deviations in (1.3, -0.4):
        close(ours.sparse_gelu_mul(gate_up, deviations), theirs.sparse_gelu_mul(gate_up, deviations))


def test_copies() -> None:
    """Match the reference: copies scaled and mixed, views of others, and results that were deferred."""
    ours, theirs, _ = both()
    copies, x, y = torch.randn(TOKENS, 3, 40), torch.randn(TOKENS, 40), torch.randn(TOKENS, 40)
    copies[1, 2] *= 1e-4
    close(ours.match_copies(ours.add(x, y), copies[:, 1:], 1e-5), theirs.match_copies(x + y, copies[:, 1:], 1e-5))
    weights = torch.randn(TOKENS, 3, 2)
    close(ours.mix_copies(copies, weights, copies[:, :2]), theirs.mix_copies(copies, weights, copies[:, :2]))
    same = torch.randn(3, 1)
    total = ours.add(x, copies[:, 1])
    close(
        ours.mix_copies(copies, same, total.unsqueeze(1)), theirs.mix_copies(copies, same, (x + copies[:, 1])[:, None])
    )
    close(ours.scale(copies[:, 2], x[0]), copies[:, 2] * x[0])


def test_experts_whose_inputs_are_scaled() -> None:
    """Match the reference: experts are chosen by scores, also where the sigmoids of all are 1."""
    ours, theirs, _ = both()
    matrices = [[torch.randn(*shape) / 7 for _ in range(4)] for shape in ((48, 40), (40, 24))]
    choice = Choice(is_sigmoid=True, scales_inputs=True)
    experts = Experts(*matrices, num_chosen=2, normalise=False, choice=choice)
    x, router = torch.randn(TOKENS, 40), torch.randn(TOKENS, 4) * torch.tensor([1.0, 1.0, 9.0, 9.0])[:, None]
    router[2:] += 60
    close(ours.experts(x, router, experts), theirs.experts(x, router, experts))


def test_sum_is_fused_with_following_norm() -> None:
    """Compute the sum whether it is read by the norm, by itself, in another shape or after the norm."""
    ours, theirs, _ = both()
    x, y, weight = torch.randn(TOKENS, 40), torch.randn(TOKENS, 40), torch.rand(40)
    total = ours.add(x, y)
    close(ours.rms_norm(total, weight, 1e-5), theirs.rms_norm(x + y, weight, 1e-5))
    close(ours.finish(total), x + y)
    close(ours.finish(ours.add(x, y)), x + y)
    close(ours.silu_mul(ours.add(x, y).view(2 * TOKENS, 20).flatten(1)), theirs.silu_mul((x + y).view(2 * TOKENS, 20)))
    again = ours.add(ours.add(x, y), y)
    close(ours.rms_norm(again, weight, 1e-5), theirs.rms_norm(x + 2 * y, weight, 1e-5))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("half", [8, 6, 0])
def test_queries_and_keys(norm: bool, half: int) -> None:
    """Norm, rotate (all of the head, part of it, nothing) and write in one launch; touch no other slot of the cache.

    Keys that are read before they are written are computed as well.
    """
    ours, theirs, cache = both()
    qkv = torch.randn(TOKENS, 10, 16)
    q, k, v = qkv.split([6, 2, 2], dim=1)
    q_weight, k_weight = torch.rand(16), torch.rand(16)
    table: Any = Table(half)

    def rotated(ops: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = ops.rms_norm(x, weight, 1e-6) if norm else x
        return x if half == 0 else ops.rope(x, table)

    expected_q, expected_k = (rotated(theirs, _padded(x), w)[:TOKENS] for x, w in ((q, q_weight), (k, k_weight)))
    for reads_early in (False, True):
        new_q, new_k = rotated(ours, q, q_weight), rotated(ours, k, k_weight)
        if reads_early:
            close(ours.finish(new_k), expected_k)
        ours.write_kv(0, new_k, v)
        close(ours.finish(new_q).contiguous(), expected_q)
        close(ours.finish(new_k).contiguous(), expected_k)
        slots = [(4, 2), (4, 3), (7, 0), (9, 1)]  # block and slot of positions 2, 3, 4 and 5
        for tensor, new in zip(cache.pair, (expected_k, v), strict=True):
            close(torch.stack([tensor[block, :, slot] for block, slot in slots]), new)
            assert tensor.isfinite().sum() == new.numel()
            tensor.fill_(torch.nan)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Pad to the reference's tile."""
    return torch.cat([x, torch.zeros(32 - len(x), *x.shape[1:])])


def test_padding_writes_to_the_null_block() -> None:
    """Write padding tokens to slot 0 of block 0 and nowhere else."""
    cache = Cache(SHAPE.num_kv_heads, SHAPE.head_dim)
    batch = attrs.evolve(BATCH)
    ops = make_ops(batch, cache, SHAPE, padding=3)
    ops.write_kv(0, torch.ones(TOKENS + 3, 2, 16), torch.ones(TOKENS + 3, 2, 16))
    written = cache.pair[0].isfinite()[:, 0, :, 0].nonzero().tolist()
    assert written == [[0, 0], [4, 2], [4, 3], [7, 0], [9, 1]]
