"""A row's logits are the same bits however it was computed: the promise that makes a cache hit invisible.

One sequence of 520 tokens (two whole chunks of keys and a bit, block borders off tile borders), of which the last
positions' logits are looked at, computed in one go by itself. Every other way must give exactly that. The pool is NaN
before each run, so reading a slot that nobody wrote shows as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import EACH, make_backend, make_batch, prompt, scattered_blocks
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, TOKENS, feed_prefix, run_chunks, run_on_copied_block

OTHERS = [prompt(length, seed=length) for length in (37, 130, 1, 64)]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=EACH)
def backend(request: pytest.FixtureRequest, checkpoints: dict[str, Path], dtype: str) -> Iterator[ReferenceBackend]:
    yield make_backend(checkpoints[request.param], dtype=dtype)


@pytest.fixture
def cold(backend: ReferenceBackend) -> torch.Tensor:
    """Logits of the last positions, from one prefill of the whole, alone."""
    result = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert result.isfinite().all()
    backend.cache.fill(float("nan"))
    return result


def test_chunks_decode_and_blocks(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Chunks of 100, then one token a step, in other blocks: the same bits as one prefill."""
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * NUM_COMPARED)
    assert torch.equal(chunked, cold)


def test_mixed_batch(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Between other rows that prefill and decode, from another offset in every pass: the same bits as alone."""
    blocks = scattered_blocks(33 + 4 * 9, seed=8)
    mine, others = blocks[:33], [blocks[33 + 9 * i : 42 + 9 * i] for i in range(4)]
    results, position = [], 0
    for turn, size in enumerate([201, 150, 161] + [1] * NUM_COMPARED):
        row = {"token_ids": TOKENS[position : position + size], "position": position, "blocks": mine}
        beside = [
            {"token_ids": tokens, "position": 0, "blocks": table} for tokens, table in zip(OTHERS, others, strict=True)
        ]
        cut = turn % 5
        batch = make_batch(*beside[:cut], row, *beside[cut:])
        position += size
        if size == 1:
            results.append(backend.logits(batch, [batch.query_start[cut + 1] - 1]))
        else:
            backend.logits(batch, [])
    assert torch.equal(torch.cat(results), cold)


def test_cached_prefix(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Upon a prefix that another request computed in other chunks, with a longer tail of its own: the same bits."""
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


def test_copied_block(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Upon a copy of the last full block, of which only the last token is computed: the same bits."""
    assert torch.equal(run_on_copied_block(backend), cold)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_size(checkpoints: dict[str, Path], block_size: int) -> None:
    """Any block size gives the same bits, also one that divides neither tile."""
    results = []
    for size, seed in ((16, 1), (block_size, 2)):
        backend = make_backend(checkpoints["llama-rope3"], block_size=size)
        results.append(run_chunks(backend, scattered_blocks(LENGTH // size + 1, seed=seed), [300, 220]))
    assert torch.equal(results[0], results[1])


def test_odd_number_of_threads(checkpoints: dict[str, Path]) -> None:
    """Three threads split loops at borders that fall within vectors; a row's bits still do not depend on its place."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backend = make_backend(checkpoints["qwen3-odd"])
        backend.one_thread = False
        alone = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
        chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * NUM_COMPARED)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, chunked)
