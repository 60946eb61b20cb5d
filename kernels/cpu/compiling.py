"""Compiles `csrc/` into one shared library for an instruction set, once for each version of the sources.

    python -m quipu.kernels.cpu.compiling   # for this machine, before anything is installed; `build` then finds it

`setup.py` uses this to build a wheel, so neither torch nor attrs is imported here. Objects and libraries are kept in
the user's cache folder, each under a name derived from its inputs: sources, flags and compiler.

What must always hold: a file under its final name is complete; two processes may compile the same file at once; no file
that another user could have written is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from .instruction_sets import CannotBuild, InstructionSet, choose_instruction_set, processor_flags

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "c++", "clang++")

Watch = Callable[[int, int], object]
"""Called with how many files are compiled, and of how many."""

_PRODUCTS = ("_bf16.cpp", "_quantized.cpp", "_bytes.cpp")

_COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    # an expression must round identically wherever it is inlined; fused operations are written explicitly
    "-ffp-contract=off",
)  # fmt: skip

_log = logging.getLogger(__name__)


def find_compiler() -> str:
    """Return `CXX` of the environment, else the first of the usual compilers. Raises CannotBuild."""
    for name in (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CannotBuild(f"no C++ compiler found (looked for {os.environ.get('CXX') or ', '.join(COMPILERS)})")


def build(instruction_set: InstructionSet, watch: Watch = lambda num_done, total: None) -> Path:
    """Return the library's file, which is compiled now if it is not cached. Raises CannotBuild."""
    compiler = find_compiler()
    headers = [*sorted(SOURCES.rglob("*.h")), *instruction_set.headers]
    common = [compiler, _version(compiler), *(part for path in headers for part in (path.name, path.read_text()))]
    folder = _cache_folder()
    jobs = []
    for source in sorted(SOURCES.rglob("*.cpp")):
        flags = [*_COMMON_FLAGS, *instruction_set.flags]
        if source.name.endswith(_PRODUCTS):
            flags += instruction_set.product_flags
        digest = _digest([*common, *flags, source.name, source.read_text()])
        jobs.append((source, flags, folder / "objects" / f"{source.stem}-{digest}.o"))
    # the names of its objects identify all inputs of a library
    library = folder / f"quipu-cpu-{instruction_set.name}-{_digest(path.name for _, _, path in jobs)}.so"
    if _is_trusted_file(library):
        return library
    started = time.monotonic()

    def compile_one(job: tuple[Path, list[str], Path]) -> None:
        source, flags, target = job
        if not _is_trusted_file(target):
            _make(target, lambda partial: [compiler, *flags, "-c", str(source), "-o", str(partial)])

    _log.info("compiling the CPU kernels for %s, once on this machine: %d files", instruction_set.name, len(jobs))
    watch(0, len(jobs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
        compiling = [compilers.submit(compile_one, job) for job in jobs]
        for num_done, one in enumerate(as_completed(compiling), 1):
            one.result()
            watch(num_done, len(jobs))
    objects = [str(path) for _, _, path in jobs]
    _make(library, lambda partial: [compiler, "-shared", "-fopenmp", *objects, "-o", str(partial)])
    _log.info(
        "compiled the CPU kernels for %s in %.1f s: %s", instruction_set.name, time.monotonic() - started, library
    )
    return library


def _make(target: Path, command: Callable[[Path], list[str]]) -> None:
    """Run a compiler that writes `target`, under a temporary name until it is complete."""
    descriptor, name = tempfile.mkstemp(prefix=target.stem, dir=target.parent)
    os.close(descriptor)
    partial = Path(name)
    arguments = command(partial)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)  # noqa: S603 - a compiler by full path
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise CannotBuild(f"{arguments[0]} failed: {done.stderr.strip()[:500]}")
    partial.chmod(0o755)
    partial.replace(target)  # atomically: another process may be about to read it


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout


def _cache_folder() -> Path:
    """Return a folder that only this user can write to, since libraries in it are executed; it contains `objects`."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "quipu"
    try:
        for each in (folder, folder / "objects"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = _why_not_trusted(each)
            if reason:
                _log.warning("not using the cache of compiled CPU kernels: %s %s", each, reason)
                break
        else:
            if os.access(folder, os.W_OK):
                return folder
    except OSError:
        pass
    private = Path(tempfile.mkdtemp(prefix="quipu-"))  # in this case kernels are compiled at each start
    (private / "objects").mkdir(mode=0o700)
    return private


def _is_trusted_file(path: Path) -> bool:
    """Return whether the file exists and is safe to use. If it is not safe, it will be replaced."""
    if not path.is_file():
        return False
    reason = _why_not_trusted(path)
    if reason:
        _log.warning("compiling CPU kernels anew: %s %s", path, reason)
    return not reason


def _why_not_trusted(path: Path) -> str:
    """Return why another user may have written the file, or an empty string."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


if __name__ == "__main__":
    with suppress(CannotBuild):  # `build` says why
        build(choose_instruction_set(processor_flags()))
