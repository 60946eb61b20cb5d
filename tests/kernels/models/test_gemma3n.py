"""Gemma 3n with quantized weights and an 8-bit cache, which the tests of all families leave out, and its constants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.kernel_checkpoints import CPU_FORMATS, make_backend
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, feed_prefix, run_chunks
from tests.kernels.oracles import differences, run
from tests.kernels.step_batches import scattered_blocks

QUANTIZED = [name for name, settings in CPU_FORMATS.items() if "quantization" in settings]


@needs_kernels
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized(checkpoints: dict[str, Path], name: str) -> None:
    """The CPU kernels compute what the reference does with the same codes, those of per-layer inputs included."""
    settings = {"dtype": "float32", "quantization": name}
    backend = make_cpu_backend(checkpoints["gemma3n"], **settings)
    assert backend.capabilities.weights.startswith(name)
    assert differences(run(backend), run(make_backend(checkpoints["gemma3n"], **settings))).mean < 0.02


@needs_kernels
@pytest.mark.parametrize("name", [*QUANTIZED, "int8-kv"])
def test_invariance(checkpoints: dict[str, Path], name: str) -> None:
    """Match one prefill with chunks, single tokens, other blocks and a cached prefix, in every format."""
    backend = make_cpu_backend(checkpoints["gemma3n"], **CPU_FORMATS[name])
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert cold.isfinite().all()
    ones = [1] * NUM_COMPARED
    assert torch.equal(run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12, *ones]), cold)
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)


@needs_kernels
def test_8_bit_cache(checkpoints: dict[str, Path]) -> None:
    """An 8-bit cache, of the layers that have keys of their own, changes logits little."""
    backend = make_cpu_backend(checkpoints["gemma3n"], dtype="float32", kv_cache_dtype="int8")
    with pytest.raises(IndexError):
        backend.cache[3]
    assert differences(run(backend), run(make_backend(checkpoints["gemma3n"], dtype="float32"))).mean < 0.1
