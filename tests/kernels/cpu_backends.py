"""The CPU backend as tests want it, and the mark that skips them where there are no kernels.

A skip says what is missing: a compiler, or the processor's instructions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernel_checkpoints import backend_config

from quipu.kernels.cpu.backend import CpuBackend
from quipu.kernels.cpu.build import CannotBuild, Kernels, load_kernels


def _why_not() -> str:
    try:
        load_kernels()
    except CannotBuild as error:
        return f"no CPU kernels here: {error}"
    return ""


_missing = _why_not()
needs_kernels = pytest.mark.skipif(bool(_missing), reason=_missing)  # no compiler or no AVX2: the reason says which


def make_cpu_backend(
    model_path: Path, *, num_threads: int = 1, kernels: Kernels | None = None, **changes: Any
) -> CpuBackend:
    """A backend whose whole pool is NaN: whatever reads a slot that nobody wrote shows."""
    backend = CpuBackend(backend_config(model_path, **changes), kernels)
    backend.num_threads = num_threads
    backend.cache.fill(float("nan"))
    return backend
