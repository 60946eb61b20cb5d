"""The reference's operations one by one: a row's bits do not depend on its index, and attention matches its definition.

Matrices are wider than the small checkpoints', so that torch does split its loops among threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from quipu.kernels.kv_cache import BlockShape, KVCache
from quipu.kernels.reference.attention import Scores, attend_span
from quipu.kernels.reference.kv_slots import slots_of
from quipu.kernels.reference.ops import ReferenceOps
from quipu.kernels.reference.plan import Span, StepPlan
from quipu.kernels.reference.rows import ROWS
from tests.kernels.step_batches import scattered_blocks

ROW_COUNTS = [ROWS * tiles for tiles in (1, 2, 3, 5, 11, 12, 13, 19, 23, 29, 31, 40)]
NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def small_cache(block_size: int = 8, dtype: torch.dtype = torch.float32) -> KVCache:
    block = BlockShape(num_layers=1, num_kv_heads=2, block_size=block_size, head_dim=16, dtype=dtype)
    cache = KVCache(96, block)
    cache.fill(float("nan"))
    return cache


@pytest.fixture
def ops() -> ReferenceOps:
    plan = StepPlan(
        spans=[], token_ids_N=NO_TOKENS, positions_N=NO_TOKENS, blocks_n=NO_TOKENS, offsets_n=NO_TOKENS
    )  # fmt: skip
    return ReferenceOps(plan, small_cache(), torch.float32)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest, one_thread: None) -> Iterator[None]:
    """Set the number of threads; three split a loop within vectors."""
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def row_by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int) -> None:
    """Check that the first `count` rows of x have the same bits in another order, and one of them in another batch."""
    expected = function(x[:count])
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=generator)
    assert torch.equal(function(x[:count][order]), expected[order])
    few = torch.cat([x[count:][: ROWS - 1], x[:1]])
    assert torch.equal(function(few)[-1], expected[0])


@pytest.mark.parametrize("width", [100, 160])
def test_silu_mul(ops: ReferenceOps, width: int) -> None:
    """Avoid torch's own silu, whose last bit differs for 4 % of numbers between a loop's body and its remainder."""
    gate_up = torch.randn(2 * ROW_COUNTS[-1], 2 * width, generator=torch.Generator().manual_seed(0)) * 3
    for count in ROW_COUNTS:
        row_by_row(ops.silu_mul, gate_up, count)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (96, 1000), (1024, 64)])
def test_linear(ops: ReferenceOps, inputs: int, outputs: int) -> None:
    """Compute the same product of a row in every tile and at every index within it."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(2 * ROW_COUNTS[6], inputs, generator=generator)
    for count in ROW_COUNTS[:6]:
        row_by_row(lambda rows: ops.linear(rows, weight), x, count)


@pytest.mark.parametrize("shape", [(1000,), (6, 16)])
def test_rms_norm(ops: ReferenceOps, shape: tuple[int, ...]) -> None:
    """Sum a row's norm in one order, whatever the other rows."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape[-1], generator=generator)
    x = torch.randn(2 * ROW_COUNTS[-1], *shape, generator=generator)
    for count in ROW_COUNTS:
        row_by_row(lambda rows: ops.rms_norm(rows, weight, 1e-6), x, count)


@pytest.mark.parametrize("width", [100, 160])
def test_operations_of_gemma3n(ops: ReferenceOps, width: int) -> None:
    """Compute the same of a row's gates and copies, whatever the other rows."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * ROW_COUNTS[-1], 3 * width + 6, generator=generator)

    def mixed(rows: torch.Tensor) -> torch.Tensor:
        copies, weights = rows[:, : 2 * width].unflatten(1, (2, width)), rows[:, 3 * width :].unflatten(1, (2, 3))
        matched = ops.match_copies(rows[:, 2 * width : 3 * width], copies, 1e-5)
        return ops.mix_copies(copies, weights, matched).flatten(1)

    for count in ROW_COUNTS:
        row_by_row(lambda rows: ops.sparse_gelu_mul(rows[:, : 2 * width], 1.3), x, count)
        row_by_row(mixed, x, count)


@pytest.mark.parametrize(
    ("window", "in_chunks", "soft_cap"),
    [
        *((None, False, None), (1, False, None), (40, False, 0.5), (256, False, None), (300, False, 2.0)),
        *((1, True, None), (50, True, 0.5), (256, True, None), (300, True, None)),
    ],
)
@pytest.mark.parametrize(("position", "length"), [(0, 1), (0, 300), (255, 2), (270, 1), (500, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["float32", "int8"])
def test_attention_matches_softmax(
    dtype: torch.dtype, position: int, length: int, window: int | None, in_chunks: bool, soft_cap: float | None
) -> None:
    """Match the plain formula in float64 up to rounding, although tiled, paged and combined from chunks."""
    generator = torch.Generator().manual_seed(position)
    context, cache = position + length, small_cache(dtype=dtype)
    blocks = torch.tensor(scattered_blocks(-(-context // 8), seed=position, num_blocks=96))
    k_CKE, v_CKE = torch.randn(2, context, 2, 16, generator=generator)
    if dtype == torch.int8:  # heads that 8 bits represent exactly: integers times a power of two
        scales_CK1 = 2.0 ** torch.randint(-8, -5, (context, 2, 1), generator=generator)
        k_CKE, v_CKE = torch.randint(-127, 128, (2, context, 2, 16), generator=generator) * scales_CK1
        k_CKE[..., 3], v_CKE[..., 5] = 127 * scales_CK1[..., 0], -127 * scales_CK1[..., 0]
    with torch.inference_mode():
        for slots, new_CKE in zip(slots_of(cache, 0), (k_CKE, v_CKE), strict=True):
            positions = torch.arange(context)
            slots.write(blocks[positions // 8], positions % 8, new_CKE)
    q_NHE = torch.randn(length, 6, 16, generator=generator)

    span = Span(start=0, length=length, position=position, blocks=blocks)
    scores = Scores(scale=0.25, window=window, in_chunks=in_chunks, soft_cap=soft_cap)
    found = attend_span(q_NHE, *slots_of(cache, 0), span, scores)

    k_CHE, v_CHE = (x.double().repeat_interleave(3, dim=1) for x in (k_CKE, v_CKE))
    s_HNC = torch.einsum("nhe,che->hnc", q_NHE.double(), k_CHE) / 4
    if soft_cap is not None:
        s_HNC = soft_cap * torch.tanh(s_HNC / soft_cap)
    at_N1 = torch.arange(position, context).unsqueeze(1)
    distance_NC, size = at_N1 - torch.arange(context), window or context
    hidden_NC = distance_NC > at_N1 % size if in_chunks else distance_NC >= size
    s_HNC.masked_fill_((distance_NC < 0) | hidden_NC, -torch.inf)
    expected = torch.einsum("hnc,che->nhe", s_HNC.softmax(-1), v_CHE)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
