"""The kernels' promise: a row's logits are the same bits however it was computed.

As `test_reference_invariance.py` does for the reference. One sequence of 520 tokens (two whole chunks of keys and a
bit), of which the last positions' logits are looked at, computed in one go by itself on one thread; every other way
must give exactly that. The pool is NaN before each run, so reading a slot that nobody wrote shows as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu.cpu_backend import CpuBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import EACH, scattered_blocks
from tests.kernels.one_prompt import LENGTH, LOOKED_AT, feed_prefix, run_among, run_chunks, run_upon_copy

pytestmark = needs_kernels


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=EACH)
def backend(request: pytest.FixtureRequest, checkpoints: dict[str, Path], dtype: str) -> Iterator[CpuBackend]:
    yield make_cpu_backend(checkpoints[request.param], dtype=dtype)


@pytest.fixture
def cold(backend: CpuBackend) -> torch.Tensor:
    """Logits of the last positions, from one prefill of the whole, alone."""
    result = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert result.isfinite().all()
    backend.cache.fill(float("nan"))
    return result


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_chunks_decode_and_placement(backend: CpuBackend, cold: torch.Tensor, num_threads: int) -> None:
    """Chunks of 100, then one token a step, in other blocks, on any number of threads: the bits of one prefill."""
    backend.num_threads = num_threads
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * LOOKED_AT)
    assert torch.equal(chunked, cold)


@pytest.mark.parametrize("num_others", [1, 2, 3, 4, 5, 6, 30])
def test_mixed_batch(backend: CpuBackend, cold: torch.Tensor, num_others: int) -> None:
    """Beside so many other rows, from another offset in every pass: the bits of going alone."""
    chunks = [201, 150, 161] + [1] * LOOKED_AT
    assert torch.equal(run_among(backend, num_others, chunks, seed=num_others), cold)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 65, 97])
def test_any_number_of_rows(backend: CpuBackend, cold: torch.Tensor, size: int) -> None:
    """Chunks of every number of rows that a kernel treats in a way of its own: the bits of one prefill."""
    chunks = [size] * (LENGTH // size) + [LENGTH % size] * (LENGTH % size > 0)
    assert torch.equal(run_chunks(backend, scattered_blocks(33, seed=size), chunks), cold)


def test_cached_prefix(backend: CpuBackend, cold: torch.Tensor) -> None:
    """Upon a prefix that another request computed in other chunks, with a longer tail of its own: the same bits."""
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


def test_copied_block(backend: CpuBackend, cold: torch.Tensor) -> None:
    """Upon a copy of the last full block, of which only the last token is computed: the same bits."""
    assert torch.equal(run_upon_copy(backend), cold)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_size(checkpoints: dict[str, Path], block_size: int) -> None:
    """Any block size gives the same bits, also one that divides neither a chunk nor a panel."""
    results = []
    for size, seed in ((16, 1), (block_size, 2)):
        backend = make_cpu_backend(checkpoints["llama-rope3"], block_size=size, dtype="bfloat16")
        results.append(run_chunks(backend, scattered_blocks(LENGTH // size + 1, seed=seed), [300, 220]))
    assert torch.equal(results[0], results[1])
