"""Compiles `csrc/` into one shared library, once for each version of it, and loads it.

    python -m quipu.kernels.cpu.build        # what the set-up command does, so that a first start need not wait

`backend.py` asks for the library at start. Nothing in it comes from torch: it is plain C functions over pointers, so a
library made once serves any torch. The compiled file is kept in the user's cache folder under a name made from its
sources, the flags and the compiler.

What must always hold: torch is imported before the library, which then shares torch's OpenMP (libgomp is found by its
name among what is loaded); two of them would fight for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import torch

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")

_COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    # the same expression must round alike wherever it is inlined; what is to be fused is fused by name
    "-ffp-contract=off",
)  # fmt: skip

_log = logging.getLogger(__name__)


class CannotBuild(Exception):
    """The kernels cannot be had on this machine; the message says why."""


@attrs.frozen
class InstructionSet:
    """A way to compile the sources, and what a processor must have to run the result."""

    name: str
    needs: frozenset[str]
    """As /proc/cpuinfo spells them."""
    flags: tuple[str, ...]


INSTRUCTION_SETS = (InstructionSet("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),)
"""The best first."""


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the processor says it can do; nothing where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def choose_instruction_set(flags: frozenset[str]) -> InstructionSet:
    """The best that runs here. Raises CannotBuild."""
    for candidate in INSTRUCTION_SETS:
        if candidate.needs <= flags:
            return candidate
    known = ", ".join(candidate.name for candidate in INSTRUCTION_SETS)
    raise CannotBuild(f"the processor has none of the instruction sets that kernels exist for ({known})")


def find_compiler() -> str:
    """`CXX` from the environment, else the first of the usual ones. Raises CannotBuild."""
    for name in (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CannotBuild(f"no C++ compiler found (looked for {os.environ.get('CXX') or ', '.join(COMPILERS)})")


def build(instruction_set: InstructionSet) -> Path:
    """The library's file, compiled now unless that was done before. Raises CannotBuild."""
    compiler = find_compiler()
    sources = sorted(SOURCES.glob("*.cpp"))
    flags = [*_COMMON_FLAGS, *instruction_set.flags]
    digest = hashlib.sha256("\0".join([compiler, _version(compiler), *flags]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = _cache_folder() / f"quipu-cpu-{instruction_set.name}-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    started = time.monotonic()
    partial = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, *map(str, sources), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a compiler by full path
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise CannotBuild(f"{compiler} failed: {done.stderr.strip()[:500]}")
    partial.replace(target)  # in one move: another process may be about to load it
    _log.info("compiled the CPU kernels for %s in %.1f s: %s", instruction_set.name, time.monotonic() - started, target)
    return target


def load(instruction_set: InstructionSet) -> ctypes.CDLL:
    """The library, its functions typed. Raises CannotBuild."""
    assert torch.get_num_threads() > 0, "torch's OpenMP is in"
    path = build(instruction_set)
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
    library.quipu_sizes.argtypes = [ctypes.c_int32]
    library.quipu_sizes.restype = ctypes.c_int64
    return library


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout


def _cache_folder() -> Path:
    """A folder that only we write to: a library found there is run."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "quipu"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="quipu-"))  # compiled at each start, then


def main() -> int:
    """Build for this machine, or say why not; a machine without a compiler is no failure."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        build(choose_instruction_set(processor_flags()))
    except CannotBuild as error:
        print(f"no CPU kernels: {error}; the reference executor will run, which is many times slower", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
