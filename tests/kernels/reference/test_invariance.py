"""Batch invariance of the reference: a row's logits have the same bits however they are computed.

This is why a cache hit does not change results. The baseline is the last positions of one sequence of 520 tokens (two
whole chunks of keys and part of a third, with blocks that do not align with tiles), prefilled at once, alone; every
other way must give its bits. The cache is filled with NaN before each run, so that reading an unwritten slot is
detected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quipu.kernels.reference.reference_backend import ReferenceBackend
from tests.kernels.kernel_checkpoints import FORMATS, IN_EACH_FORMAT, make_backend
from tests.kernels.one_prompt import (
    LENGTH,
    NUM_COMPARED,
    feed_prefix,
    run_among,
    run_chunks,
    run_drafted,
    run_on_copied_block,
)
from tests.kernels.step_batches import scattered_blocks


@pytest.fixture(scope="module", params=IN_EACH_FORMAT, ids="-".join)
def fresh(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> ReferenceBackend:
    """Return a backend that all tests of one checkpoint and format use: loading it takes longer than most of them."""
    name, numbers = request.param
    return make_backend(checkpoints[name], **FORMATS[numbers])


@pytest.fixture(scope="module")
def cold(fresh: ReferenceBackend) -> torch.Tensor:
    """Return the baseline: logits of the last positions, from one prefill without a cache, alone."""
    result = run_chunks(fresh, scattered_blocks(33, seed=5), [LENGTH])
    assert result.isfinite().all()
    return result


@pytest.fixture
def backend(fresh: ReferenceBackend, cold: torch.Tensor) -> ReferenceBackend:
    """Return the backend with nothing in its cache, after the baseline was computed."""
    fresh.cache.fill(float("nan"))
    return fresh


def test_chunks_decode_and_blocks(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Match one prefill with chunks of 100, then single tokens, in other blocks."""
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * NUM_COMPARED)
    assert torch.equal(chunked, cold)


def test_mixed_batch(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Match a run alone among rows that prefill and decode, at a different offset in every pass."""
    assert torch.equal(run_among(backend, 4, [201, 150, 161] + [1] * NUM_COMPARED, seed=8), cold)


@pytest.mark.covering
@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_draft_rows(backend: ReferenceBackend, cold: torch.Tensor, num_others: int) -> None:
    """Match one prefill with rows of one token each in one pass, the later of which read what the earlier write."""
    assert torch.equal(run_drafted(backend, scattered_blocks(40, seed=7), num_others), cold)


def test_cached_prefix(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Match a cold run on a prefix that another request computed, in other chunks and with a suffix of its own."""
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


def test_copied_block(backend: ReferenceBackend, cold: torch.Tensor) -> None:
    """Match a cold run on a copy of the last full block, of which only the last token is computed."""
    assert torch.equal(run_on_copied_block(backend), cold)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_size(checkpoints: dict[str, Path], block_size: int) -> None:
    """Compute the same bits for any block size, even one that divides neither tile."""
    results = []
    for size, seed in ((16, 1), (block_size, 2)):
        backend = make_backend(checkpoints["llama-rope3"], block_size=size)
        results.append(run_chunks(backend, scattered_blocks(LENGTH // size + 1, seed=seed), [300, 220]))
    assert torch.equal(results[0], results[1])


def test_odd_number_of_threads(checkpoints: dict[str, Path]) -> None:
    """Compute the same bits with three threads, which split loops within vectors."""
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
