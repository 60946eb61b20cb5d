"""The CPU kernels against the reference, and against transformers where the reference's own distance is known.

Differences are in units of the logits' own standard deviation, as in `test_reference_parity.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_backends import make_cpu_backend, needs_kernels
from kernel_checkpoints import CONFIGS, make_backend, make_batch, prompt, scattered_blocks
from test_logprobs import drawn_and_prompt
from test_reference_parity import TOLERANCES, allowed_for, differences, run_transformers

from quipu.kernels.cpu.backend import CpuBackend
from quipu.kernels.reference.backend import ReferenceBackend

pytestmark = needs_kernels

NUM_PREFILL = 300  # a whole chunk of keys and part of the next
NUM_DECODES = 64
# In float32 both do the same arithmetic in another order. In bfloat16 a key or a value that lies between two numbers of
# the cache may be rounded to the other one, which is a 256th of it.
CLOSE = {"float32": 2e-5, "bfloat16": 4e-3}


def run(backend: CpuBackend | ReferenceBackend, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position: the prefill's at once, the rest from one-token steps."""
    blocks = scattered_blocks(23, seed=1)
    prefill = make_batch({"token_ids": token_ids[:NUM_PREFILL], "position": 0, "blocks": blocks})
    logits = [backend.logits(prefill, list(range(NUM_PREFILL)))]
    for position in range(NUM_PREFILL, len(token_ids)):
        step = make_batch({"token_ids": [token_ids[position]], "position": position, "blocks": blocks})
        logits.append(backend.logits(step, [0]))
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_the_reference(checkpoints: dict[str, Path], name: str, dtype: str) -> None:
    """Every position's logits, prefilled and decoded, are the reference's but for rounding."""
    token_ids = prompt(NUM_PREFILL + NUM_DECODES, seed=7)
    ours = run(make_cpu_backend(checkpoints[name], dtype=dtype), token_ids)
    theirs = run(make_backend(checkpoints[name], dtype=dtype), token_ids)
    assert theirs.std() > 0.5, "logits too flat to tell a wrong model from a right one"
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    print(name, dtype, difference)
    assert difference <= CLOSE[dtype]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Teacher-forced argmax regret, mean and p99 differences are within the reference's own tolerances."""
    token_ids = prompt(NUM_PREFILL + NUM_DECODES, seed=7)
    for dtype in TOLERANCES:
        ours = run(make_cpu_backend(checkpoints[name], dtype=dtype), token_ids)
        found = differences(ours, run_transformers(checkpoints[name], dtype, token_ids))
        print(name, dtype, found)
        allowed = allowed_for(name, dtype)
        assert found.regret <= allowed.regret
        assert found.mean <= allowed.mean
        assert found.p99 <= allowed.p99


def test_logprobs(checkpoints: dict[str, Path]) -> None:
    """Scores of drawn and prompt tokens are the reference's, and the same bits in chunks and beside others."""
    ours = make_cpu_backend(checkpoints["qwen3-tied"])
    alone = drawn_and_prompt(ours, [140], 0, 1)
    assert drawn_and_prompt(ours, [50, 1, 89], 3, 2) == alone
    theirs = drawn_and_prompt(make_backend(checkpoints["qwen3-tied"]), [140], 0, 1)
    for mine, other in zip(alone, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.top_ids == other.top_ids
        assert mine.ranks == other.ranks
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
