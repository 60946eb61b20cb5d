"""All invariance tests of the kernels on the other instruction sets: `make test-long`.

The imported tests run in `test_invariance.py` on the chosen set; the fixtures below replace the kernels and use
a model of each kind of attention and MLP.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quipu.kernels.cpu.cpu_backend import CpuBackend
from tests.kernels.cpu.cpu_backends import make_cpu_backend
from tests.kernels.cpu.cpu_paths import OTHER_CASES, kernels_of
from tests.kernels.cpu.test_invariance import (  # noqa: F401 (pytest collects them here)
    backend,
    cold,
    test_any_number_of_rows,
    test_cached_prefix,
    test_chunks_decode_and_blocks,
    test_mixed_batch,
)
from tests.kernels.kernel_checkpoints import CPU_FORMATS

# the first use of an emulated instruction set compiles it
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["qwen3-odd", "gemma3", "qwen3-moe"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=OTHER_CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def fresh(request: pytest.FixtureRequest, checkpoints: dict[str, Path], name: str) -> CpuBackend:
    path, numbers = request.param
    return make_cpu_backend(checkpoints[name], kernels=kernels_of(path), **CPU_FORMATS[numbers])
