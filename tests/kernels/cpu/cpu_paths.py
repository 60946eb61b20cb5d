"""The kernels for every instruction set of `compiled_paths.py`, and the formats that each is tested with."""

from __future__ import annotations

from functools import cache

import pytest

from quipu.kernels.cpu.build import Kernels, load, open_library
from quipu.kernels.cpu.instruction_sets import CannotBuild
from tests.kernel_markers import why_missing
from tests.kernels.cpu.compiled_paths import BY_NAME, PATHS, CpuPath, library_of, one_process, why_not_native
from tests.kernels.kernel_checkpoints import CPU_FORMATS

__all__ = ["PATHS", "CpuPath", "why_not_native"]

CASES = [
    (path, numbers)
    for path in PATHS
    for numbers in CPU_FORMATS
    # for float32 the bfloat16 instruction sets run the same code as AVX-512; VNNI matters to quantized weights only
    if (path.name != "avx512_vnni" or numbers.endswith("-bytes"))
    and (numbers != "float32" or not (path.is_emulated and path.rounds_activations))
]
"""Instruction sets and names in CPU_FORMATS."""
OTHER_CASES = [case for case in CASES if case[0] != next(path for path in PATHS if not path.is_emulated)]
"""The cases of all instruction sets except the one that is chosen on this machine."""


def kernels_of(path: CpuPath) -> Kernels:
    """Return the kernels; skip the test with a reason if they are unavailable."""
    kernels = _kernels_of(path)
    if isinstance(kernels, str):
        pytest.skip(f"{path}: {kernels}")  # no AVX2, compiler or headers
    return kernels


@cache
def _kernels_of(path: CpuPath) -> Kernels | str:
    if path.unusable:
        return path.unusable
    with one_process():
        try:
            return Kernels(str(path), open_library(library_of(path)) if path.is_emulated else load(BY_NAME[path.name]))
        except CannotBuild as error:
            return why_missing(error)
