"""The instruction sets that kernels exist for, and which of them this processor runs. The one place that looks.

`build.py` compiles and loads what is chosen here; `setup.py` compiles all of them into a wheel, in an environment that
has neither torch nor attrs, so neither is imported here.

What must always hold: a set is chosen only if the processor, and for AMX the system too, lets this process use it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FORCED = "QUIPU_CPU_ISA"
"""Environment variable that names the set to run, to compare or to test; see docs/kernels.md."""

_AVX512 = ("-DQUIPU_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
_AVX512_NEEDS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})

# Linux on x86-64: ask for a part of a thread's state that is not there unless asked for.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


class CannotBuild(Exception):
    """The kernels cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class InstructionSet:
    """A way to compile the sources, and what a processor must have to run the result."""

    name: str
    needs: frozenset[str]
    """As /proc/cpuinfo spells them."""
    flags: tuple[str, ...]
    product_flags: tuple[str, ...] = ()
    """Added for *_bf16.cpp; the other sources' objects are shared among sets of the same flags."""
    headers: tuple[Path, ...] = ()
    """That the flags include, besides those that lie among the sources."""


INSTRUCTION_SETS = (
    InstructionSet(
        "amx_bf16",
        _AVX512_NEEDS | {"amx_tile", "amx_bf16"},
        _AVX512,
        ("-DQUIPU_PAIRS", "-DQUIPU_AMX", "-mamx-tile", "-mamx-bf16"),
    ),
    InstructionSet("avx512_bf16", _AVX512_NEEDS | {"avx512_bf16"}, _AVX512, ("-DQUIPU_PAIRS", "-mavx512bf16")),
    InstructionSet("avx512", _AVX512_NEEDS, _AVX512),
    InstructionSet("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
)
"""The best first."""


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the processor says it can do; nothing where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def ask_for_tiles() -> str:
    """Ask the system for AMX's tiles, for all threads of this process. Gives why it refuses; nothing where it does not.

    Linux, Documentation/arch/x86/xstate.rst. Asking again does no harm.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return ""
    return f"the system does not give this process AMX's tiles: {os.strerror(ctypes.get_errno())}"


def why_unusable(
    candidate: InstructionSet, flags: frozenset[str], *, ask_for_tiles: Callable[[], str] = ask_for_tiles
) -> str:
    """Why a set does not run here; nothing where it does."""
    missing = candidate.needs - flags
    if missing:
        return f"the processor lacks {', '.join(sorted(missing))}"
    return ask_for_tiles() if "amx_tile" in candidate.needs else ""


def usable_instruction_sets(
    flags: frozenset[str], *, ask_for_tiles: Callable[[], str] = ask_for_tiles
) -> list[InstructionSet]:
    """Those that run here, the best first; only the one that the environment forces, where it does.

    Raises CannotBuild where none runs here, and ValueError, so that nothing else is run instead, for a forced one that
    does not exist or does not run here.
    """
    forced = os.environ.get(FORCED)
    known = ", ".join(candidate.name for candidate in INSTRUCTION_SETS)
    if forced:
        named = [candidate for candidate in INSTRUCTION_SETS if candidate.name == forced]
        if not named:
            raise ValueError(f"{FORCED} is {forced!r}, which is none of {known}")
        reason = why_unusable(named[0], flags, ask_for_tiles=ask_for_tiles)
        if reason:
            raise ValueError(f"{FORCED} asks for {forced!r}, which cannot run here: {reason}")
        return named
    usable = [
        candidate for candidate in INSTRUCTION_SETS if not why_unusable(candidate, flags, ask_for_tiles=ask_for_tiles)
    ]
    if not usable:
        raise CannotBuild(f"the processor has none of the instruction sets that kernels exist for ({known})")
    return usable


def choose_instruction_set(flags: frozenset[str]) -> InstructionSet:
    """The best that runs here, or the forced one. Raises as `usable_instruction_sets`."""
    return usable_instruction_sets(flags)[0]
