"""The arithmetic of `python -m bench.execution`: the minimum work of a step, and the share of the limit it reached."""

from __future__ import annotations

import pytest

from bench.execution import Sample, speedup_row
from bench.machine_limits import QUICK_SIZES, Limits, Rates
from bench.shapes import QWEN3_06B as SHAPE
from bench.step_works import Setting, Work, make_batch
from quipu.kernels.backend import MemoryPlan
from tests.kernels.cpu.cpu_backends import needs_kernels

NUM_WEIGHTS = 28 * (1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072) + SHAPE["vocab_size"] * 1024


PLAN = MemoryPlan(
    num_blocks=1025,
    block_size=16,
    block_bytes=16 * 2 * 8 * 128 * 2 * 28,
    max_model_len=2048,
    weights_bytes=2 * NUM_WEIGHTS,
    workspace_bytes=None,
)
"""Weights and KV cache in bfloat16."""


def test_minimum_work_of_a_step() -> None:
    """A step reads all weights and earlier KV; it does two operations per weight and row, and attention."""
    one = Work("decode_1", 1, 1, 512)
    kept = 2 * 8 * 128 * 2 * 28 * 511
    assert one.bytes_read(PLAN) == 2 * NUM_WEIGHTS + kept
    assert one.operations() == 2 * NUM_WEIGHTS + 4 * 16 * 128 * 512 * 28
    eight = Work("decode_8", 8, 1, 512)
    assert eight.bytes_read(PLAN) == 2 * NUM_WEIGHTS + 8 * kept
    assert eight.operations() == 8 * one.operations()
    assert Work("prefill_8", 1, 8, 8).bytes_read(PLAN) == 2 * NUM_WEIGHTS, "no earlier keys and values"


def test_shared_prefix() -> None:
    """Rows that share a prefix hold its blocks together, read it once, and are compared with rows that have copies."""
    apart, shared = Setting(context=64, shared=2048, streams=(1, 8)).works()
    assert (apart.context, shared.context) == (2112, 2112)
    assert apart.bytes_read(PLAN) - shared.bytes_read(PLAN) == 7 * 2048 * 2 * 8 * 128 * 2 * 28
    assert apart.operations() == shared.operations()
    tables = make_batch(shared, num_blocks=1 + 8 * 132).block_tables
    assert len({block for table in tables for block in table}) == 128 + 8 * 4
    assert len({block for table in make_batch(apart, 1 + 8 * 132).block_tables for block in table}) == 8 * 132
    rates = Rates(1.0, 1.0, "a")
    samples = {apart: [Sample(6.0, rates), Sample(4.0, rates)], shared: [Sample(2.0, rates), Sample(2.0, rates)]}
    assert speedup_row(shared, samples)["value"] == 2.5


def test_share_of_binding_limit() -> None:
    """A step is compared with the larger of the two times."""
    work = Work("decode_8", 8, 1, 512)
    by_memory = Sample(2.0, Rates(work.bytes_read(PLAN), work.operations() * 10, "ours")).row(work, PLAN)
    assert by_memory["share_of_limit"] == pytest.approx(0.5) and by_memory["limited_by"] == "reading"
    assert (by_memory["value"], by_memory["limit"]) == (4.0, pytest.approx(8.0))
    by_units = Sample(2.0, Rates(work.bytes_read(PLAN) * 10, work.operations() / 1.8, "ours")).row(work, PLAN)
    assert by_units["share_of_limit"] == pytest.approx(0.9) and by_units["limited_by"] == "products ours"


def test_better_of_two_moments() -> None:
    """The best product is named, whenever it was measured; reading is compared by itself."""
    assert Rates(3.0, 5.0, "a").better(Rates(4.0, 2.0, "b")) == Rates(4.0, 5.0, "a")
    assert Rates(3.0, 5.0, "a").better(Rates(2.0, 6.0, "b")) == Rates(3.0, 6.0, "b")


@needs_kernels
@pytest.mark.parametrize(("quantization", "activations"), [(None, "float"), ("int8", "float"), ("int8", "int8")])
def test_products_of_each_format(quantization: str | None, activations: str) -> None:
    """Products are of the numbers that a step multiplies, and every one of them is measured."""
    limits = Limits(QUICK_SIZES, quantization, activations)
    names = {name.removeprefix("products, ").split(",")[0] for name in limits.best if name.startswith("products")}
    in_registers = {"in registers"} & names
    if activations == "int8":
        assert names == {"ours int8"} | in_registers
    else:
        others = {"ours int8"} if quantization else set()
        assert names == {"torch float32", "torch bfloat16", "ours", "in registers"} | others
    assert all(rate > 0 for rate in limits.best.values())
