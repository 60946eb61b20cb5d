"""The CPU backend as tests want it, and the mark of those that need it."""

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
    """A backend whose whole pool is NaN: whatever reads a slot that nobody wrote shows."""
    backend = CpuBackend(backend_config(model_path, **changes), kernels)
    backend.num_threads = num_threads
    backend.cache.fill(float("nan"))
    return backend
