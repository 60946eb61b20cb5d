"""How far an 8-bit KV cache takes the demo model's predictions from those with a float32 one."""

from __future__ import annotations

import math

import pytest
import torch

from bench.accuracy import compare, kl_of
from quipu.actors.shared.checkpoint import DEMO
from tests.kernel_markers import needs_kernels


@needs_kernels
@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_int8_kv_cache(executor: str) -> None:
    """Over a long document and shorter chats, the distribution is almost the same and the likeliest token is, too."""
    num_tokens = 1500 if executor == "cpu" else 400
    settings = {"executor": executor, "kv_cache_dtype": "int8"}
    report = compare(DEMO, settings, {**settings, "kv_cache_dtype": "float32"}, num_tokens)
    assert report.num_tokens == num_tokens
    assert 0 < report.mean_kl <= 5e-3
    assert report.argmax_agreement >= 0.99


def test_kl() -> None:
    """The divergence is that of the definition, from the base, and 0 between equal distributions."""
    base, measured = torch.tensor([[0.75, 0.25]]).double(), torch.tensor([[0.5, 0.5]]).double()
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_of(base.log() + 3, measured.log() - 1).item() == pytest.approx(expected)
    assert kl_of(base.log(), base.log()).item() == 0
