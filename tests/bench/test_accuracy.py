"""How far 8-bit KV caches and quantized weights take the demo model's predictions from those in float32."""

from __future__ import annotations

import math

import pytest
import torch

from bench.accuracy import SETTINGS, base_of, compare, kl_of
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


@needs_kernels
@pytest.mark.parametrize(
    ("quantization", "activations", "most_kl", "least_agreement"),
    [("int8", "float", 1e-4, 0.99), ("int4", "float", 1e-4, 0.99), ("int8", "int8", 5e-3, 0.97)],
)
def test_quantized_weights(quantization: str, activations: str, most_kl: float, least_agreement: float) -> None:
    """The kernels predict what the same quantized weights predict in float32; of few tokens, a few may be near ties."""
    settings = {**SETTINGS, "quantization": quantization, "activations": activations}
    report = compare(DEMO, settings, base_of(settings), 1000)
    assert 0 < report.mean_kl <= most_kl
    assert report.argmax_agreement >= least_agreement


def test_kl() -> None:
    """The divergence is that of the definition, from the base, and 0 between equal distributions."""
    base, measured = torch.tensor([[0.75, 0.25]]).double(), torch.tensor([[0.5, 0.5]]).double()
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_of(base.log() + 3, measured.log() - 1).item() == pytest.approx(expected)
    assert kl_of(base.log(), base.log()).item() == 0
