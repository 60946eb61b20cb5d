"""The digest that is equal only for engines that compute the same bits."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.engine.executor.loading import numerics_of
from quipu.kernels.backend import Capabilities

CAPABILITIES = Capabilities(
    name="cpu", kv_cache_dtype="bfloat16", dtype="bfloat16", invariant=True, weights="int8", instruction_set="avx2"
)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "reference"},
        {"dtype": "float32"},
        {"weights": "int4-g32"},
        {"activations": "int8"},
        {"kv_cache_dtype": "int8"},
        {"instruction_set": "avx512"},
        {"library": "vllm 0.32.0 CPU_ATTN"},
    ],
)
def test_whatever_changes_bits_changes_the_digest(change: dict[str, Any]) -> None:
    """The digest depends on backend, dtypes, formats, instruction set and library, but not on the number of threads."""
    assert numerics_of(attrs.evolve(CAPABILITIES, **change)) != numerics_of(CAPABILITIES)
    assert numerics_of(attrs.evolve(CAPABILITIES, num_threads=3)) == numerics_of(CAPABILITIES)
