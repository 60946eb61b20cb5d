"""Make CPU backends for tests, and re-export the mark for tests that need the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quipu.kernels.cpu.build import Kernels
from quipu.kernels.cpu.cpu_backend import CpuBackend
from tests.kernel_markers import needs_kernels
from tests.kernels.kernel_checkpoints import backend_config

__all__ = ["make_cpu_backend", "needs_kernels"]


def make_cpu_backend(
    model_path: Path, *, num_threads: int = 1, kernels: Kernels | None = None, **changes: Any
) -> CpuBackend:
    """Make a backend whose cache is filled with NaN, so that reading an unwritten slot is detected."""
    backend = CpuBackend(backend_config(model_path, **changes), kernels)
    backend.num_threads = num_threads
    backend.cache.fill(float("nan"))
    return backend
