"""The kernels for every instruction set: native if the processor supports it, otherwise emulated.

Emulated kernels are the same sources, compiled with the headers in `emulation/` in place of intrinsics, so that the
algorithm is tested on any machine with AVX2.

    python -m tests.kernels.cpu.cpu_paths

compiles whatever is missing, as `make install-test` does. Otherwise it is compiled at first use, in one process of a
test run while the others wait for it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

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
from tests.kernel_markers import why_missing
from tests.kernels.kernel_checkpoints import CPU_FORMATS

_EMULATION = Path(__file__).parent / "emulation"
_SIMDE = "simde/x86/avx512/add.h"
_INCLUDE_FOLDERS = (Path("/usr/include"), Path("/usr/local/include"))
_BY_NAME = {each.name: each for each in INSTRUCTION_SETS}


@attrs.frozen
class CpuPath:
    """An instruction set, native or emulated."""

    name: str
    is_emulated: bool

    def __str__(self) -> str:
        return f"{self.name}-emulated" if self.is_emulated else self.name

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are rounded to bfloat16 before a product with a bfloat16 matrix."""
        return self.name in ("amx_bf16", "avx512_bf16")


def why_not_native(name: str) -> str:
    """Return why the processor cannot run an instruction set; empty if it can."""
    return why_unusable(_BY_NAME[name], processor_flags())


PATHS = [CpuPath(name, name != "avx2" and bool(why_not_native(name))) for name in _BY_NAME]
"""All instruction sets, the best first."""
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
    reason = why_not_native("avx2" if path.is_emulated else path.name)
    if reason:
        return reason
    with _one_process():
        return _compiled(path)


def _compiled(path: CpuPath) -> Kernels | str:
    try:
        if not path.is_emulated:
            return Kernels(path.name, load(_BY_NAME[path.name]))
        if not any((folder / _SIMDE).is_file() for folder in _INCLUDE_FOLDERS):
            return "no SIMDe headers to emulate it with (Debian package: libsimde-dev)"
        # where a compiler finds headers; in its options, checkouts would compile the same file anew
        with mock.patch.dict(os.environ, CPATH=str(_EMULATION)):
            return Kernels(str(path), open_library(build(_emulated(_BY_NAME[path.name]))))
    except CannotBuild as error:
        return why_missing(error)


@contextmanager
def _one_process() -> Iterator[None]:
    """Let only one process of this checkout compile at a time: the next one finds the result."""
    descriptor = os.open(_EMULATION, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _emulated(native: InstructionSet) -> InstructionSet:
    """Replace the compiler's options for instructions by headers that emulate these."""

    def definitions(flags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(flag for flag in flags if flag.startswith("-D"))

    return InstructionSet(
        f"{native.name}-emulated",
        needs=frozenset(),
        flags=(
            *definitions(native.flags),
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-O1",  # with the next line: the shortest time to compile and run together
            "-DUNROLL=",
            "-Wno-psabi",
            "-include",
            "instructions.h",
        ),
        product_flags=definitions(native.product_flags),
        headers=tuple(sorted(_EMULATION.glob("*.h"))),
    )


def main() -> None:
    """Compile the kernels of every instruction set, and print which of them cannot be had here."""
    for path in PATHS:
        kernels = _kernels_of(path)
        if isinstance(kernels, str):
            print(f"{path} will not be tested: {kernels}")


if __name__ == "__main__":
    main()
