"""Batch invariance of the CPU kernels: a row's logits have the same bits however they are computed.

The counterpart of `reference/test_invariance.py`. The baseline is the last positions of one sequence of 520 tokens (two
whole chunks of keys and part of a third), prefilled at once, alone, on one thread; every other way must give its bits.
The cache is filled with NaN before each run, so that reading an unwritten slot is detected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu import program
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.cpu.program import Op
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, IN_EACH_CPU_FORMAT
from tests.kernels.one_prompt import (
    LENGTH,
    NUM_COMPARED,
    TOKENS,
    feed_prefix,
    run_among,
    run_chunks,
    run_drafted,
    run_on_copied_block,
)
from tests.kernels.step_batches import make_batch, scattered_blocks

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=IN_EACH_CPU_FORMAT, ids="-".join)
def fresh(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> CpuBackend:
    """Return a backend that all tests of one checkpoint and format use: loading it takes longer than most of them."""
    name, numbers = request.param
    return make_cpu_backend(checkpoints[name], **CPU_FORMATS[numbers])


@pytest.fixture(scope="module")
def cold(fresh: CpuBackend) -> torch.Tensor:
    """Return the baseline: logits of the last positions, from one prefill without a cache, alone."""
    result = run_chunks(fresh, scattered_blocks(33, seed=5), [LENGTH])
    assert result.isfinite().all()
    return result


@pytest.fixture
def backend(fresh: CpuBackend, cold: torch.Tensor) -> CpuBackend:
    """Return the backend with nothing in its cache, after the baseline was computed."""
    fresh.cache.fill(float("nan"))
    fresh.num_threads = 1
    return fresh


@pytest.mark.covering
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_chunks_decode_and_blocks(backend: CpuBackend, cold: torch.Tensor, num_threads: int) -> None:
    """Match one prefill with chunks of 100, then single tokens, in other blocks, on any number of threads."""
    backend.num_threads = num_threads
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * NUM_COMPARED)
    assert torch.equal(chunked, cold)


@pytest.mark.covering
@pytest.mark.parametrize("num_others", [1, 2, 3, 4, 5, 6, 30])
def test_mixed_batch(backend: CpuBackend, cold: torch.Tensor, num_others: int) -> None:
    """Match a run alone when other rows are in the batch, at a different offset in every pass."""
    chunks = [201, 150, 161] + [1] * NUM_COMPARED
    assert torch.equal(run_among(backend, num_others, chunks, seed=num_others), cold)


@pytest.mark.covering
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 31, 32, 33, 64, 65, 97])
def test_any_number_of_rows(backend: CpuBackend, cold: torch.Tensor, size: int) -> None:
    """Match one prefill with chunks of every number of rows that a kernel treats specially."""
    chunks = [size] * (LENGTH // size) + [LENGTH % size] * (LENGTH % size > 0)
    assert torch.equal(run_chunks(backend, scattered_blocks(33, seed=size), chunks), cold)


@pytest.mark.covering
@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_draft_rows(backend: CpuBackend, cold: torch.Tensor, num_others: int) -> None:
    """Match one prefill with rows of one token each in one pass, the later of which read what the earlier write."""
    assert torch.equal(run_drafted(backend, scattered_blocks(40, seed=7), num_others), cold)


def test_cached_prefix(backend: CpuBackend, cold: torch.Tensor) -> None:
    """Match a cold run on a prefix that another request computed, in other chunks and with a suffix of its own."""
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-odd"])
def test_denormals(checkpoints: dict[str, Path], name: str) -> None:
    """Treat values that are denormal, or whose products with weights are, alike in a chunk and in single tokens.

    What attention computes of them is lost in the logits, so its results are compared.
    """
    backend = make_cpu_backend(checkpoints[name], **CPU_FORMATS["bfloat16"])
    (op, *_) = (op for op in backend._program.trunk if op.kind == program.ATTEND)
    draw = torch.Generator().manual_seed(9)
    for tensor in backend.cache.tensors:
        bits = torch.randint(0, 1 << 16, tensor.shape, generator=draw, dtype=torch.int32) & 0x83FF  # below 2^-119
        tensor.view(torch.int16).copy_(bits.to(torch.int16))
    backend.cache[0][0].zero_()
    tokens, blocks = TOKENS[-NUM_COMPARED:], scattered_blocks(33, seed=8)
    memory = {tensor.data_ptr(): tensor for tensor in backend._program.workspace}
    x = next(memory[at] for at in memory if at <= op.x < at + memory[at].nbytes)
    rows = x[: NUM_COMPARED * op.x_stride].view(NUM_COMPARED, -1)
    rows.copy_(torch.randn(rows.shape, generator=draw))
    given = rows * 2.0**-122  # keys and queries are normed, values are not
    results = []
    for first, last in ((0, NUM_COMPARED), *((i, i + 1) for i in range(NUM_COMPARED))):
        rows[: last - first] = given[first:last]
        position = LENGTH - NUM_COMPARED + first
        row = {"token_ids": tokens[first:last], "position": position, "blocks": blocks}
        backend._pass(make_batch(row)).run(backend._library, (Op * 1)(op), [])
        y = memory[op.y].view(torch.int16 if op.y_rounded else torch.int32)
        results.append(y[: (last - first) * op.y_stride].view(last - first, -1)[:, : op.num_heads * op.width].clone())
    together, *single = results
    assert together.any() and torch.equal(together, torch.cat(single))


def test_copied_block(backend: CpuBackend, cold: torch.Tensor) -> None:
    """Match a cold run on a copy of the last full block, of which only the last token is computed."""
    assert torch.equal(run_on_copied_block(backend), cold)


@pytest.mark.covering
@pytest.mark.parametrize("block_size", [8, 24, 64])
@pytest.mark.parametrize("name", ["llama-rope3", "qwen3-tied"])  # heads of 16, and of 32
@pytest.mark.parametrize("numbers", ["bfloat16", "int8-kv"])
def test_block_size(checkpoints: dict[str, Path], numbers: str, block_size: int, name: str) -> None:
    """Compute the same bits for any block size, even one that divides neither a chunk nor a panel."""
    results = []
    for size, seed in ((16, 1), (block_size, 2)):
        backend = make_cpu_backend(checkpoints[name], block_size=size, **CPU_FORMATS[numbers])
        results.append(run_chunks(backend, scattered_blocks(LENGTH // size + 1, seed=seed), [300, 220]))
    assert torch.equal(results[0], results[1])
