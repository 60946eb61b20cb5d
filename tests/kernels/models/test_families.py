"""Every family on both CPU backends: a row's logits have the same bits however they are computed.

A short form of `reference/test_invariance.py` and `cpu/test_invariance.py`, which test a few families thoroughly (and
all in `make test-long`). Together with the parity tests, which compare a cold run with transformers, it shows that
cached, chunked and batched runs are as close to transformers. Windows are shorter than the prompt, and soft caps small
enough to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import THOROUGH, make_backend
from tests.kernels.one_prompt import LENGTH, NUM_COMPARED, feed_prefix, run_among, run_chunks
from tests.kernels.step_batches import scattered_blocks

MAKE: dict[str, Callable[..., Any]] = {"reference": make_backend, "cpu": make_cpu_backend}


@pytest.mark.covering
@pytest.mark.parametrize("backend_name", ["reference", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in THOROUGH])
def test_batch_invariance(checkpoints: dict[str, Path], name: str, dtype: str, backend_name: str) -> None:
    """Match one prefill with chunks, single tokens, other blocks, a batch and a cached prefix."""
    backend = MAKE[backend_name](checkpoints[name], dtype=dtype)
    cold = run_chunks(backend, scattered_blocks(33, seed=5), [LENGTH])
    assert cold.isfinite().all()
    backend.cache.fill(float("nan"))
    ones = [1] * NUM_COMPARED
    assert torch.equal(run_chunks(backend, scattered_blocks(33, seed=6), [100] * 5 + [12, *ones]), cold)
    backend.cache.fill(float("nan"))
    assert torch.equal(run_among(backend, 5, [201, 150, 161, *ones], seed=7), cold)
    backend.cache.fill(float("nan"))
    mine, prefix = feed_prefix(backend)
    assert torch.equal(run_chunks(backend, mine, [LENGTH - prefix], start=prefix), cold)
