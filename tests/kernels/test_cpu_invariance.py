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
from cpu_backends import make_cpu_backend, needs_kernels
from kernel_checkpoints import CONFIGS, make_batch, prompt, scattered_blocks
from one_prompt import LENGTH, LOOKED_AT, TOKENS, run_chunks

from quipu.kernels.cpu.backend import CpuBackend

pytestmark = needs_kernels


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CONFIGS)
def backend(request: pytest.FixtureRequest, checkpoints: dict[str, Path], dtype: str) -> Iterator[CpuBackend]:
    yield make_cpu_backend(checkpoints[request.param], dtype=dtype)


@pytest.fixture
def cold(backend: CpuBackend) -> torch.Tensor:
    """Logits of the last positions, from one prefill of the whole, alone."""
    result = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert result.isfinite().all()
    backend.cache.fill(float("nan"))
    return result


def run_among(backend: CpuBackend, num_others: int, chunks: list[int], *, seed: int) -> torch.Tensor:
    """Feed TOKENS in chunks in the middle of other rows, which prefill odd numbers of tokens."""
    tables = scattered_blocks(33 + 2 * num_others, seed=seed)
    others = [
        {
            "slot": 1 + i,
            "token_ids": prompt(1 + 7 * i % 32, seed=i),
            "position": 0,
            "blocks": tables[33 + 2 * i : 35 + 2 * i],
        }
        for i in range(num_others)
    ]
    results, position = [], 0
    for turn, size in enumerate(chunks):
        row = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": tables[:33]}
        cut = turn % (num_others + 1)
        batch = make_batch(*others[:cut], row, *others[cut:])
        first = batch.query_start[cut]
        wanted = [first + i for i in range(size) if position + i >= LENGTH - LOOKED_AT]
        results.append(backend.logits(batch, wanted))
        position += size
    return torch.cat(results)


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
    prefix = 256 + 5 * 16
    shared = scattered_blocks(60, seed=9)
    backend.logits(make_batch({"position": 0, "blocks": shared[:30], "token_ids": TOKENS[:90]}), [])
    tail = TOKENS[90:prefix] + prompt(70, seed=10)
    backend.logits(make_batch({"position": 90, "blocks": shared[:30], "token_ids": tail}), [])
    mine = shared[: prefix // 16] + shared[30:42]
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_size(checkpoints: dict[str, Path], block_size: int) -> None:
    """Any block size gives the same bits, also one that divides neither a chunk nor a panel."""
    results = []
    for size, seed in ((16, 1), (block_size, 2)):
        backend = make_cpu_backend(checkpoints["llama-rope3"], block_size=size, dtype="bfloat16")
        results.append(run_chunks(backend, scattered_blocks(LENGTH // size + 1, seed=seed), [300, 220]))
    assert torch.equal(results[0], results[1])
