"""Whole models on each instruction set: the reference's logits, and the same bits however a row was computed.

What `test_cpu_parity.py` and `test_cpu_invariance.py` do for the one that is chosen here, in short; in full, marked
slow, in `test_paths_long.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu.cpu_backend import CpuBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.cpu.cpu_paths import CASES, CpuPath, kernels_of
from tests.kernels.cpu.test_invariance import run_among
from tests.kernels.kernel_checkpoints import make_backend, make_batch, prompt, scattered_blocks
from tests.kernels.one_prompt import LENGTH, LOOKED_AT, TOKENS, run_chunks

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

# In units of the logits' own standard deviation. Where activations are rounded to bfloat16 before each product, as
# torch rounds them, the distance is a rounding's, many times over.
CLOSE = {"float32": 2e-5, "bfloat16": 4e-3}
CLOSE_ROUNDED = 0.1

over_cases = pytest.mark.parametrize(("path", "dtype"), CASES, ids=str)


@pytest.fixture
def name() -> str:
    """Half a vector's head, an MLP width that nothing divides, biases."""
    return "qwen3-odd"


@pytest.fixture
def backend(checkpoints: dict[str, Path], path: CpuPath, dtype: str, name: str) -> CpuBackend:
    return make_cpu_backend(checkpoints[name], kernels=kernels_of(path), dtype=dtype)


@over_cases
def test_instruction_set_is_reported(backend: CpuBackend, path: CpuPath) -> None:
    """The instruction set that runs stands in the capabilities, and from there in logs and /server_info."""
    assert backend.capabilities.instruction_set == str(path)
    assert backend.capabilities.invariant


@over_cases
@pytest.mark.parametrize("name", ["qwen3-odd", "gemma2"])  # the latter with windows and soft caps
def test_logits_match_the_reference(
    backend: CpuBackend, checkpoints: dict[str, Path], path: CpuPath, dtype: str, name: str
) -> None:
    """Prefilled and decoded, every position's logits are the reference's but for rounding."""
    token_ids, blocks = prompt(304, seed=7), scattered_blocks(20, seed=1)
    logits = []
    for runner in (backend, make_backend(checkpoints[name], dtype=dtype)):
        prefill = make_batch({"token_ids": token_ids[:300], "position": 0, "blocks": blocks})
        parts = [runner.logits(prefill, list(range(300)))]
        for position in range(300, 304):
            step = make_batch({"token_ids": [token_ids[position]], "position": position, "blocks": blocks})
            parts.append(runner.logits(step, [0]))
        logits.append(torch.cat(parts))
    ours, theirs = logits
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    print(path, dtype, name, difference)
    assert difference <= (CLOSE_ROUNDED if path.rounds_activations and dtype == "bfloat16" else CLOSE[dtype])


@over_cases
def test_bits_do_not_change(backend: CpuBackend) -> None:
    """In chunks and one by one, on two threads, beside others, upon a cached prefix: the bits of one prefill."""
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert cold.isfinite().all()
    backend.cache.fill(float("nan"))
    backend.num_threads = 2
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * LOOKED_AT)
    assert torch.equal(chunked, cold)
    backend.cache.fill(float("nan"))
    backend.num_threads = 1
    assert torch.equal(run_among(backend, 5, [201, 150, 161] + [1] * LOOKED_AT, seed=7), cold)
    backend.cache.fill(float("nan"))
    shared, prefix = scattered_blocks(60, seed=9), 256 + 5 * 16
    backend.logits(make_batch({"position": 0, "blocks": shared[:30], "token_ids": TOKENS[:90]}), [])
    tail = TOKENS[90:prefix] + prompt(70, seed=10)
    backend.logits(make_batch({"position": 90, "blocks": shared[:30], "token_ids": tail}), [])
    mine = shared[: prefix // 16] + shared[30:42]
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)
