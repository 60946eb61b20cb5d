"""The kernels' libraries: those that came with the package, else compiled here, once; and loading them.

    python -m quipu.kernels.cpu.build [--all]   # what the set-up command does, so that a first start need not wait

A wheel brings a library for each instruction set in `lib/`. In a checkout, and where those cannot be loaded,
`compiling.py` makes the one that is needed. Nothing in a library comes from torch: it is plain C functions over
pointers, so one made once serves any torch. `cpu_backend.py` asks for `load_kernels` at start.

What must always hold: torch is imported before a library, which then shares torch's OpenMP (libgomp is found by its
name among what is loaded); two of them would fight for the cores.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import sys
from pathlib import Path

import attrs
import torch

from .compiling import build
from .instruction_sets import (
    INSTRUCTION_SETS,
    CannotBuild,
    InstructionSet,
    choose_instruction_set,
    processor_flags,
    usable_instruction_sets,
    why_unusable,
)

__all__ = ["CannotBuild", "Kernels", "choose_instruction_set", "load", "load_kernels", "processor_flags"]

PACKAGED = Path(__file__).parent / "lib"

_log = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Kernels:
    """A library, and what it was compiled for."""

    instruction_set: str
    library: ctypes.CDLL


def load_kernels() -> Kernels:
    """Kernels for the best instruction set that runs here and can be had.

    Raises CannotBuild where there is none, and ValueError where the environment forces one that does not run here.
    """
    missing: list[tuple[InstructionSet, CannotBuild]] = []
    for instruction_set in usable_instruction_sets(processor_flags()):
        try:
            kernels = Kernels(instruction_set.name, load(instruction_set))
        except CannotBuild as error:
            missing.append((instruction_set, error))
            continue
        for better, reason in missing:
            _log.warning("no kernels for %s, which this processor has: %s", better.name, reason)
        return kernels
    raise missing[-1][1]  # the caller says it, once


def load(instruction_set: InstructionSet) -> ctypes.CDLL:
    """The library, its functions typed. Raises CannotBuild."""
    packaged = packaged_library(instruction_set)
    if packaged.is_file():
        try:
            return open_library(packaged)
        except CannotBuild as error:
            _log.warning("compiling the CPU kernels, since those of the package do not fit: %s", error)
    return open_library(build(instruction_set))


def packaged_library(instruction_set: InstructionSet) -> Path:
    """Where a wheel has it."""
    return PACKAGED / f"quipu-cpu-{instruction_set.name}.so"


def open_library(path: Path) -> ctypes.CDLL:
    """Load a file. Raises CannotBuild."""
    assert torch.get_num_threads() > 0, "torch's OpenMP is in"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from None
    library.quipu_pack.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    library.quipu_pack.restype = None
    library.quipu_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.quipu_run.restype = None
    library.quipu_large_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.quipu_large_pages.restype = None
    library.quipu_layout.argtypes = [ctypes.c_int32]
    library.quipu_layout.restype = ctypes.c_void_p
    return library


def main() -> int:
    """Build what runs here, or everything, and list it; a machine without a compiler is no failure."""
    parser = argparse.ArgumentParser(prog="python -m quipu.kernels.cpu.build")
    parser.add_argument("--all", action="store_true", help="for every instruction set, not only the one that runs here")
    arguments = parser.parse_args()
    flags = processor_flags()
    try:
        chosen = choose_instruction_set(flags)
    except CannotBuild as error:
        print(f"no CPU kernels: {error}; the reference executor will run, which is many times slower", file=sys.stderr)
        return 0
    for instruction_set in INSTRUCTION_SETS:
        reason = why_unusable(instruction_set, flags)
        what = "chosen here" if instruction_set is chosen else reason or "runs here"
        if instruction_set is not chosen and not arguments.all:
            print(f"{instruction_set.name:12} not built: {what}")
            continue
        packaged = packaged_library(instruction_set)
        try:
            print(f"{instruction_set.name:12} {packaged if packaged.is_file() else build(instruction_set)} ({what})")
        except CannotBuild as error:
            print(f"{instruction_set.name:12} cannot be built: {error}", file=sys.stderr)
            if instruction_set is chosen:
                print("without it the reference executor runs, which is many times slower", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
