"""Checks of the processor, the compiler, the memory, GPUs and the clock. No torch here: it takes seconds to load.

`root` is where `/proc`, `/sys` and `/dev` are looked for; tests have their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from quipu.actors.fleet.machine_parts import visible_gpus
from quipu.kernels.cpu.compiling import find_compiler
from quipu.kernels.cpu.instruction_sets import (
    INSTRUCTION_SETS,
    CannotBuild,
    processor_flags,
    usable_instruction_sets,
    why_unusable,
)
from quipu.kernels.machine import memory, usable_cpus

from .findings import Finding, Verdict

ROOT = Path("/")
LITTLE_MEMORY = 2 << 30
"""The demo model runs with less; the smallest models that people use do not."""
_TIME_ERROR = 5
"""What adjtimex returns where nothing keeps the clock right."""
_OLDEST_TIME = 1_780_000_000
"""A clock before this (2026-05-28) is wrong: this file is newer."""


def check_processor(root: Path = ROOT) -> Finding:
    """Find which instruction set the CPU kernels use."""
    flags = processor_flags(root / "proc/cpuinfo")
    count = f"{usable_cpus()} CPUs, {platform.machine()}"
    try:
        best = usable_instruction_sets(flags)[0]
    except (CannotBuild, ValueError) as error:
        advice = "use `--executor reference` for tiny models, or another processor"
        return Finding("processor", f"{count}: {error}", Verdict.PROBLEM, advice)
    text = f"{count}: {best.name}"
    if best is INSTRUCTION_SETS[0]:
        return Finding("processor", text)
    return Finding("processor", f"{text} (not {INSTRUCTION_SETS[0].name}: {why_unusable(INSTRUCTION_SETS[0], flags)})")


def check_kernels(libraries: Path, root: Path = ROOT) -> Finding:
    """Find whether the CPU kernels are there, or can be compiled. `libraries`: those that a wheel contains."""
    try:
        best = usable_instruction_sets(processor_flags(root / "proc/cpuinfo"))[0]
    except (CannotBuild, ValueError):
        return Finding("kernels", "none for this processor", Verdict.PROBLEM)
    if (libraries / f"quipu-cpu-{best.name}.so").is_file():
        return Finding("kernels", "part of the package")
    try:
        return Finding("kernels", f"compiled at the first start by {find_compiler()}")
    except CannotBuild as error:
        return Finding("kernels", str(error), Verdict.PROBLEM, "install g++ or clang++, or a wheel of quipu")


def check_memory(root: Path = ROOT) -> Finding:
    """Find how much memory there is, and whether it comes in large pages."""
    try:
        found = memory(root)
    except (OSError, KeyError) as error:
        return Finding("memory", f"cannot be read: {error}", Verdict.WARNING, "pass --kv-cache-memory")
    text = f"{_gib(found.available)} of {_gib(found.total)} available"
    if found.available < LITTLE_MEMORY:
        return Finding("memory", text, Verdict.WARNING, "serve a small model, or end what else uses memory")
    setting = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if _read(setting).endswith("[never]"):
        advice = f"echo madvise > {setting}: passes over large weights and long contexts take less time"
        return Finding("memory", f"{text}, without large pages", Verdict.WARNING, advice)
    return Finding("memory", text)


def check_gpu(torch_version: str, environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> Finding:
    """Find GPUs, and whether torch's build fits what there is. `torch_version`: with its local part, such as `+cpu`."""
    gpus, has_driver = visible_gpus(environment, root), (root / "proc/driver/nvidia/version").exists()
    is_for_cpus = torch_version.endswith("+cpu")
    if not gpus:
        text = f"none{' that this process may see' if has_driver else ''}; torch {torch_version}"
        if is_for_cpus or has_driver or "+" not in torch_version:
            return Finding("gpu", text)
        advice = "torch's build for CPUs is a tenth of the size: docs/operate/installing.md"
        return Finding("gpu", text, Verdict.WARNING, advice)
    text = f"{len(gpus)} of NVIDIA; torch {torch_version}"
    if not has_driver:
        return Finding("gpu", text, Verdict.WARNING, "the driver is not loaded (`nvidia-smi`); CPUs are used")
    if is_for_cpus:
        return Finding(
            "gpu", text, Verdict.WARNING, "install torch's CUDA build, or CPUs are used: docs/operate/gpu.md"
        )
    return Finding("gpu", text)


def check_clock(now: Callable[[], float] = time.time, state: Callable[[], int] | None = None) -> Finding:
    """Find whether the clock is plausible, and kept right: records of usage and keys' validity depend on it."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now()))
    if now() < _OLDEST_TIME:
        return Finding("clock", text, Verdict.PROBLEM, "set the clock: usage records and prices go by it")
    if (state or _clock_state)() == _TIME_ERROR:
        advice = "run chrony or systemd-timesyncd, unless the host keeps the time"
        return Finding("clock", f"{text}, which no time service is known to keep right", Verdict.OK, advice)
    return Finding("clock", text)


def _clock_state() -> int:
    """Return the clock's state as the system sees it; 0 if that is not known."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    return 0 if adjtimex is None else int(adjtimex(ctypes.create_string_buffer(512)))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
