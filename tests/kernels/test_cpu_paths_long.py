"""The parity and invariance tests of the kernels, all of them, on each instruction set: `make test-long` runs these.

The tests are those of `test_cpu_parity.py` and `test_cpu_invariance.py`; the fixtures below give them other kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_backends import make_cpu_backend
from cpu_paths import PATHS, CpuPath, kernels_of
from kernel_checkpoints import CONFIGS
from test_cpu_invariance import (  # noqa: F401 - pytest finds them here
    cold,
    dtype,
    test_any_number_of_rows,
    test_cached_prefix,
    test_chunks_decode_and_placement,
    test_mixed_batch,
)

from quipu.kernels.cpu.backend import CpuBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first use of an emulated instruction set compiles it


@pytest.fixture(params=PATHS, ids=str)
def path(request: pytest.FixtureRequest) -> CpuPath:
    return request.param


@pytest.fixture(params=CONFIGS)
def backend(request: pytest.FixtureRequest, checkpoints: dict[str, Path], path: CpuPath, dtype: str) -> CpuBackend:  # noqa: F811 - the fixture
    return make_cpu_backend(checkpoints[request.param], kernels=kernels_of(path), dtype=dtype)
