"""The instruction sets that kernels are tested for, native if the processor supports them, otherwise emulated.

Emulated kernels are the same sources, compiled with the headers in `emulation/` in place of intrinsics, so that the
algorithm is tested on any machine with AVX2.

    python -m tests.kernels.cpu.compiled_paths

compiles whatever is missing. `make install-test` does so while pip installs, so nothing is imported here that a server
does not need either. Otherwise a library is compiled at first use, in one process of a test run while the others wait.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import attrs

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
BY_NAME = {each.name: each for each in INSTRUCTION_SETS}


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

    @property
    def unusable(self) -> str:
        """Why not even the emulation runs here, or an empty string."""
        if reason := why_not_native("avx2" if self.is_emulated else self.name):
            return reason
        if self.is_emulated and not any((folder / _SIMDE).is_file() for folder in _INCLUDE_FOLDERS):
            return "no SIMDe headers to emulate it with (Debian package: libsimde-dev)"
        return ""


def why_not_native(name: str) -> str:
    """Return why the processor cannot run an instruction set; empty if it can."""
    return why_unusable(BY_NAME[name], processor_flags())


PATHS = [CpuPath(name, name != "avx2" and bool(why_not_native(name))) for name in BY_NAME]
"""All instruction sets, the best first."""


def library_of(path: CpuPath) -> Path:
    """Return the library of a usable path, which is compiled if it is missing. Raises CannotBuild."""
    if not path.is_emulated:
        return build(BY_NAME[path.name])
    # where a compiler finds headers; in its options, checkouts would compile the same file anew
    with mock.patch.dict(os.environ, CPATH=str(_EMULATION)):
        return build(_emulated(BY_NAME[path.name]))


@contextmanager
def one_process() -> Iterator[None]:
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
        reason = path.unusable
        if not reason:
            try:
                library_of(path)
            except CannotBuild as error:
                reason = str(error)
        if reason:
            print(f"{path} will not be tested: {reason}")


if __name__ == "__main__":
    main()
