"""The CPU kernels' logits compared with the reference's, and with transformers' within the reference's tolerances.

Differences are in standard deviations of the logits, as in `reference/test_parity.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.kernels.cpu.cpu_backends import make_cpu_backend, needs_kernels
from tests.kernels.family_configs import CONFIGS
from tests.kernels.kernel_checkpoints import make_backend
from tests.kernels.oracles import TOLERANCES, check, differences, run, run_reference, run_transformers
from tests.kernels.sampling.test_logprobs import drawn_and_prompt

pytestmark = needs_kernels

# In float32 both do the same arithmetic in another order. In bfloat16 a key or value halfway between two
# representable numbers may be rounded to the other one, which differs by 1/256.
CLOSE = {"float32": 2e-5, "bfloat16": 4e-3}
# Six layers, whose results are normed: what one rounds differently, the next does not make smaller.
LESS_CLOSE = {("gemma3n", "float32"): 5e-5, ("gemma4", "float32"): 5e-5}
ROUNDING = ("amx_bf16", "avx512_bf16")
"""Instruction sets that round activations before bfloat16 products: as far from the reference as torch is."""


@cache
def run_cpu(path: Path, dtype: str) -> tuple[torch.Tensor, str | None]:
    """Return the kernels' logits, and their instruction set."""
    backend = make_cpu_backend(path, dtype=dtype)
    return run(backend), backend.capabilities.instruction_set


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_the_reference(checkpoints: dict[str, Path], name: str, dtype: str) -> None:
    """Match the reference's logits up to rounding at every position, prefilled and decoded."""
    (ours, instruction_set), theirs = run_cpu(checkpoints[name], dtype), run_reference(checkpoints[name], dtype)
    assert theirs.std() > 0.5, "logits too flat to detect a wrong model"
    if dtype == "bfloat16" and instruction_set in ROUNDING:
        check(name, dtype, differences(ours, theirs))
        return
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    print(name, dtype, difference)
    assert difference <= LESS_CLOSE.get((name, dtype), CLOSE[dtype])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Stay within the reference's tolerances: teacher-forced argmax regret, mean and p99 difference."""
    for dtype in TOLERANCES:
        ours, _ = run_cpu(checkpoints[name], dtype)
        check(name, dtype, differences(ours, run_transformers(checkpoints[name], dtype)))


def test_logprobs(checkpoints: dict[str, Path]) -> None:
    """Match the reference's scores of sampled and prompt tokens, with the same bits in chunks and in a batch."""
    ours = make_cpu_backend(checkpoints["qwen3-tied"])
    alone = drawn_and_prompt(ours, [140], 0, 1)
    assert drawn_and_prompt(ours, [50, 1, 89], 3, 2) == alone
    theirs = drawn_and_prompt(make_backend(checkpoints["qwen3-tied"]), [140], 0, 1)
    for mine, other in zip(alone, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.top_ids == other.top_ids
        assert mine.ranks == other.ranks
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
