"""Every instruction set that kernels exist for: as the processor runs it, or emulated where it does not.

Emulated means: the same sources, compiled with the headers in `emulation/` in place of the instructions, so that the
algorithm is tested on any machine with AVX2. The first use in a session compiles, if no earlier session did.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import pytest

from quipu.kernels.cpu.build import Kernels, load, open_library
from quipu.kernels.cpu.compiling import build
from quipu.kernels.cpu.instruction_sets import (
    INSTRUCTION_SETS,
    CannotBuild,
    InstructionSet,
    processor_flags,
    why_unusable,
)

_EMULATION = Path(__file__).parent / "emulation"
_SIMDE = "simde/x86/avx512/add.h"
_INCLUDE_FOLDERS = (Path("/usr/include"), Path("/usr/local/include"))
_BY_NAME = {each.name: each for each in INSTRUCTION_SETS}


@attrs.frozen
class CpuPath:
    """An instruction set, and how its instructions are had."""

    name: str
    is_emulated: bool

    def __str__(self) -> str:
        return f"{self.name}-emulated" if self.is_emulated else self.name

    @property
    def rounds_activations(self) -> bool:
        """bfloat16 matrices meet activations that were rounded to bfloat16."""
        return self.name in ("amx_bf16", "avx512_bf16")


def why_not_native(name: str) -> str:
    """Why the processor does not run an instruction set; nothing where it does."""
    return why_unusable(_BY_NAME[name], processor_flags())


PATHS = [CpuPath(name, name != "avx2" and bool(why_not_native(name))) for name in _BY_NAME]
"""The best first."""
CASES = [
    (path, dtype)
    for path in PATHS
    for dtype in ("float32", "bfloat16")
    # in float32 the bfloat16 instruction sets run what AVX-512 runs
    if dtype == "bfloat16" or not (path.is_emulated and path.rounds_activations)
]
OTHER_CASES = [case for case in CASES if case[0] != next(path for path in PATHS if not path.is_emulated)]
"""Of the instruction sets that are not the one chosen here."""


def kernels_of(path: CpuPath) -> Kernels:
    """Skips the test where they cannot be had, and says why."""
    kernels = _kernels_of(path)
    if isinstance(kernels, str):
        pytest.skip(f"{path}: {kernels}")  # no AVX2, no compiler or no headers: the reason says which
    return kernels


@cache
def _kernels_of(path: CpuPath) -> Kernels | str:
    reason = why_not_native("avx2" if path.is_emulated else path.name)
    if reason:
        return reason
    try:
        if not path.is_emulated:
            return Kernels(path.name, load(_BY_NAME[path.name]))
        if not any((folder / _SIMDE).is_file() for folder in _INCLUDE_FOLDERS):
            return "no SIMDe headers to emulate it with (Debian has them in libsimde-dev)"
        return Kernels(str(path), open_library(build(_emulated(_BY_NAME[path.name]))))
    except CannotBuild as error:
        return str(error)


def _emulated(native: InstructionSet) -> InstructionSet:
    """Instead of the compiler's options for instructions, headers that do without them."""

    def definitions(flags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(flag for flag in flags if flag.startswith("-D"))

    return InstructionSet(
        f"{native.name}-emulated",
        needs=frozenset(),
        flags=(
            *definitions(native.flags),
            "-mavx2",
            "-mfma",
            "-O1",  # with the next line: what compiles and runs in the shortest time together
            "-DUNROLL=",
            "-Wno-psabi",
            "-include",
            str(_EMULATION / "instructions.h"),
        ),
        product_flags=definitions(native.product_flags),
        headers=tuple(sorted(_EMULATION.glob("*.h"))),
    )
