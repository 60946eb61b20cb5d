"""Fixtures for tests of each instruction set, native or emulated."""

from __future__ import annotations

import pytest

from quipu.kernels.cpu.build import Kernels
from tests.kernels.cpu.cpu_paths import PATHS, CpuPath, kernels_of


@pytest.fixture(params=PATHS, ids=str)
def path(request: pytest.FixtureRequest) -> CpuPath:
    cpu_path: CpuPath = request.param
    return cpu_path


@pytest.fixture
def kernels(path: CpuPath) -> Kernels:
    return kernels_of(path)
