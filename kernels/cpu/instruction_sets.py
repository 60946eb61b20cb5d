"""The instruction sets that have kernels, and the choice of those that this processor supports.

`setup.py` compiles all of them into a wheel, in an environment with neither torch nor attrs: neither is imported here.

What must always hold: a set is chosen only if the processor, and for AMX also the system, lets this process use it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FORCED = "QUIPU_CPU_ISA"
"""Environment variable that forces a set, for comparisons and tests; see docs/internals/kernels.md."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c"})
_AVX512 = ("-DQUIPU_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BF16 = ("-DQUIPU_PAIRS", "-mavx512bf16", "-mavx512vbmi", "-DQUIPU_VNNI", "-mavx512vnni")
_BF16_NEEDS = _AVX512_NEEDS | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
_VNNI = ("-DQUIPU_VNNI", "-mavx512vnni")

# Linux on x86-64: request permission for a component of a thread's state that is off by default.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


class CannotBuild(Exception):
    """The kernels cannot be built or loaded on this machine; the message says why."""


@dataclass(frozen=True)
class InstructionSet:
    """How to compile the sources for a kind of processor, and the features that it must have."""

    name: str
    needs: frozenset[str]
    """Processor features, as /proc/cpuinfo spells them."""
    flags: tuple[str, ...]
    product_flags: tuple[str, ...] = ()
    """Additional flags for products (`_PRODUCTS` in compiling.py). Objects of other sources are shared among sets."""
    headers: tuple[Path, ...] = ()
    """Headers included through the flags, in addition to those in `csrc/`."""


INSTRUCTION_SETS = (
    InstructionSet(
        "amx_bf16",
        _BF16_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"},
        _AVX512,
        ("-DQUIPU_AMX", "-mamx-tile", "-mamx-bf16", "-mamx-int8", *_BF16),
    ),
    InstructionSet("avx512_bf16", _BF16_NEEDS, _AVX512, _BF16),
    InstructionSet("avx512_vnni", _AVX512_NEEDS | {"avx512_vnni"}, _AVX512, _VNNI),
    InstructionSet("avx512", _AVX512_NEEDS, _AVX512),
    InstructionSet("avx2", _AVX2_NEEDS, _AVX2),
)
"""Best first."""


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's features; empty if they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def request_tiles() -> str:
    """Request AMX tiles from the system for all threads of this process. Return why it refuses, or an empty string.

    See Linux, Documentation/arch/x86/xstate.rst. Repeated requests are harmless.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return ""
    return f"the system does not permit AMX tiles: {os.strerror(ctypes.get_errno())}"


def why_unusable(
    candidate: InstructionSet, flags: frozenset[str], *, request_tiles: Callable[[], str] = request_tiles
) -> str:
    """Return why a set does not run here, or an empty string."""
    missing = candidate.needs - flags
    if missing:
        return f"the processor lacks {', '.join(sorted(missing))}"
    return request_tiles() if "amx_tile" in candidate.needs else ""


def usable_instruction_sets(
    flags: frozenset[str], *, request_tiles: Callable[[], str] = request_tiles
) -> list[InstructionSet]:
    """Return the sets that run here, best first, or only the one that the environment forces.

    Raises CannotBuild if none runs here, and ValueError for a forced one that does not exist or does not run here,
    rather than using another.
    """
    forced = os.environ.get(FORCED)
    known = ", ".join(candidate.name for candidate in INSTRUCTION_SETS)
    if forced:
        named = [candidate for candidate in INSTRUCTION_SETS if candidate.name == forced]
        if not named:
            raise ValueError(f"{FORCED} is {forced!r}, which is none of {known}")
        reason = why_unusable(named[0], flags, request_tiles=request_tiles)
        if reason:
            raise ValueError(f"{FORCED} asks for {forced!r}, which cannot run here: {reason}")
        return named
    usable = [
        candidate for candidate in INSTRUCTION_SETS if not why_unusable(candidate, flags, request_tiles=request_tiles)
    ]
    if not usable:
        raise CannotBuild(f"the processor supports none of the instruction sets that there are kernels for ({known})")
    return usable


def choose_instruction_set(flags: frozenset[str]) -> InstructionSet:
    """Return the best set that runs here, or the forced one. Raises as `usable_instruction_sets` does."""
    return usable_instruction_sets(flags)[0]
