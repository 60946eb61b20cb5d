"""Whole models on each instruction set: the reference's logits, and the same bits however a row is computed.

A short form of `test_parity.py` and `test_invariance.py`, which run on the set that is chosen on this machine.
`test_paths_long.py`, marked slow, runs all invariance tests on the others.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from quipu.kernels.cpu.cpu_backend import CpuBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.cpu.cpu_paths import CASES, CpuPath, kernels_of
from tests.kernels.cpu.test_invariance import run_among
from tests.kernels.kernel_checkpoints import CPU_FORMATS, FORMATS, make_backend
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, TOKENS, Backend, run_chunks
from tests.kernels.step_batches import make_batch, prompt, scattered_blocks

pytestmark = pytest.mark.timeout(600)  # the first use of an emulated instruction set compiles it

# In standard deviations of the logits. Where activations are rounded to bfloat16 before each product, as in torch,
# the rounding errors accumulate. In 8 bits a key or value near a half may be rounded to the other integer. The
# reference rounds dequantized weights to the model's dtype, and has no activations in 8 bits.
QUANTIZED = {"int8": 0.15, "int4": 0.15, "int8-bytes": 0.4, "int4-bytes": 0.4}
CLOSE = {"float32": 2e-5, "bfloat16": 4e-3, "int8-kv": 1e-2, **QUANTIZED}
CLOSE_ROUNDED = {"float32": 2e-5, "bfloat16": 0.1, "int8-kv": 0.2, **QUANTIZED}

over_cases = pytest.mark.parametrize(("path", "numbers"), CASES, ids=str)


@pytest.fixture
def name() -> str:
    """Return a checkpoint with a head of half a vector, an MLP width that no vector length divides, and biases."""
    return "qwen3-odd"


@pytest.fixture
def backend(checkpoints: dict[str, Path], path: CpuPath, numbers: str, name: str) -> CpuBackend:
    return make_cpu_backend(checkpoints[name], kernels=kernels_of(path), **CPU_FORMATS[numbers])


def run(runner: Backend) -> torch.Tensor:
    """Return the logits of one prompt: one prefill, then steps of one token."""
    token_ids, blocks = prompt(304, seed=7), scattered_blocks(20, seed=1)
    prefill = make_batch({"token_ids": token_ids[:300], "position": 0, "blocks": blocks})
    parts = [runner.logits(prefill, list(range(300)))]
    for position in range(300, 304):
        step = make_batch({"token_ids": [token_ids[position]], "position": position, "blocks": blocks})
        parts.append(runner.logits(step, [0]))
    return torch.cat(parts)


@cache
def run_reference(path: Path, numbers: str) -> torch.Tensor:
    """Return the reference's logits, which are those for every instruction set."""
    return run(make_backend(path, **FORMATS[numbers]))


@pytest.mark.covering(1)
@over_cases
def test_instruction_set_is_reported(backend: CpuBackend, path: CpuPath) -> None:
    """Report the instruction set in the capabilities, from which logs and /server_info take it."""
    assert backend.capabilities.instruction_set == str(path)
    assert backend.capabilities.invariant


@pytest.mark.covering
@over_cases
@pytest.mark.parametrize("name", ["qwen3-odd", "gemma2"])  # the latter with windows and soft caps
def test_logits_match_the_reference(
    backend: CpuBackend, checkpoints: dict[str, Path], path: CpuPath, numbers: str, name: str
) -> None:
    """Match the reference's logits up to rounding at every position, prefilled and decoded."""
    ours, theirs = run(backend), run_reference(checkpoints[name], numbers.removesuffix("-bytes"))
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    print(path, numbers, name, difference)
    assert difference <= (CLOSE_ROUNDED if path.rounds_activations else CLOSE)[numbers]


@over_cases
def test_batch_invariance(backend: CpuBackend) -> None:
    """Match one prefill with chunks and single tokens, on two threads, in a batch, and on a cached prefix."""
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert cold.isfinite().all()
    backend.cache.fill(float("nan"))
    backend.num_threads = 2
    chunked = run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12] + [1] * NUM_COMPARED)
    assert torch.equal(chunked, cold)
    backend.cache.fill(float("nan"))
    backend.num_threads = 1
    assert torch.equal(run_among(backend, 5, [201, 150, 161] + [1] * NUM_COMPARED, seed=7), cold)
    backend.cache.fill(float("nan"))
    shared, prefix = scattered_blocks(60, seed=9), 256 + 5 * 16
    backend.logits(make_batch({"position": 0, "blocks": shared[:30], "token_ids": TOKENS[:90]}), [])
    tail = TOKENS[90:prefix] + prompt(70, seed=10)
    backend.logits(make_batch({"position": 90, "blocks": shared[:30], "token_ids": tail}), [])
    mine = shared[: prefix // 16] + shared[30:42]
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)
