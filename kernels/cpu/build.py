"""Loading the kernels' shared libraries: those of the package, else compiled once on this machine.

    python -m quipu.kernels.cpu.build [--all]   # run at installation, so that the first start need not wait

A wheel contains a library for each instruction set in `lib/`. In a checkout, or if those cannot be loaded,
`compiling.py` compiles the one that is needed. A library does not depend on torch: it has plain C functions that take
pointers, and works with any version of torch. `cpu_backend.py` calls `load_kernels` at start.

What must always hold: torch is imported before a library, which then shares torch's OpenMP runtime (libgomp, found by
name among the loaded libraries); two runtimes would compete for the cores.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from ..checkpoints.progress import Progress
from .compiling import Watch, build
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

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "quipu_pack": (None, [_POINTER, _POINTER, _INT64, _INT64, _INT32]),
    "quipu_pack_quantized": (None, [_POINTER, _POINTER, _INT64, _INT64]),
    "quipu_panel": (_INT32, []),
    "quipu_multiplies_pairs": (_INT32, []),
    "quipu_run": (None, [_POINTER, _INT64, _POINTER]),
    "quipu_multiply_in_registers": (_INT64, [_INT64, _INT32, _INT64]),
    "quipu_large_pages": (None, [_POINTER, _INT64]),
    "quipu_touch": (None, [_POINTER, _INT64]),
    "quipu_copy_rows": (None, [_POINTER, _POINTER, *[_INT64] * 4]),
    "quipu_layout": (_POINTER, [_INT32]),
    "quipu_sample": (None, [_POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER, _INT64]),
    "quipu_sample_bf16": (None, [_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _INT64]),
    "quipu_score": (None, [_POINTER, *[_INT64] * 3, *[_POINTER] * 5, _INT64]),
}
"""The functions of a library: the result and argument types of each."""


@attrs.frozen(eq=False)
class Kernels:
    """A library, and the instruction set that it was compiled for."""

    instruction_set: str
    library: ctypes.CDLL


def load_kernels() -> Kernels:
    """Load kernels for the best instruction set that runs here and can be compiled.

    Raises CannotBuild if there is none, and ValueError if the environment forces one that does not run here.
    """
    missing: list[tuple[InstructionSet, CannotBuild]] = []
    for instruction_set in usable_instruction_sets(processor_flags()):
        try:
            kernels = Kernels(instruction_set.name, load(instruction_set))
        except CannotBuild as error:
            missing.append((instruction_set, error))
            continue
        for better, reason in missing:
            _log.warning("no kernels for %s, although this processor supports it: %s", better.name, reason)
        return kernels
    raise missing[-1][1]  # the caller logs it, once


def load(instruction_set: InstructionSet) -> ctypes.CDLL:
    """Load the library of an instruction set and declare its functions. Raises CannotBuild."""
    packaged = packaged_library(instruction_set)
    if packaged.is_file():
        try:
            return open_library(packaged)
        except CannotBuild as error:
            _log.warning("compiling the CPU kernels, because those of the package cannot be used: %s", error)
    with _shown() as watch:
        library = build(instruction_set, watch)
    return open_library(library)


@contextmanager
def _shown() -> Iterator[Watch]:
    """Show how far compiling is; nothing if everything is compiled already."""
    progress: Progress | None = None

    def watch(num_done: int, total: int) -> None:
        nonlocal progress
        if progress is None:
            progress = Progress("compiling the CPU kernels", total, "files")
        if num_done:
            progress.advance(1)

    try:
        yield watch
    finally:
        if progress is not None:
            progress.remove()


def packaged_library(instruction_set: InstructionSet) -> Path:
    """Return the path of the library in a wheel."""
    return PACKAGED / f"quipu-cpu-{instruction_set.name}.so"


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library file. Raises CannotBuild."""
    assert torch.get_num_threads() > 0, "torch has loaded its OpenMP runtime"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def main() -> int:
    """Build what runs here, or everything, and list it. A machine without a compiler is not an error."""
    parser = argparse.ArgumentParser(prog="python -m quipu.kernels.cpu.build")
    parser.add_argument(
        "--all", action="store_true", help="build for every instruction set, not only the one that runs here"
    )
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
