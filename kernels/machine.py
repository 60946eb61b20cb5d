"""CPUs and memory that this process may use, within the limits of its control groups.

`load.py` asks for the number of threads before torch loads, `kv_cache_size.py` and the backends ask for memory. Linux
only; supports both versions of control groups at their usual mount points. No torch here.

What must always hold: a limit that cannot be read is ignored; no result exceeds what the machine has.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import attrs

_ROOT = Path("/")


@attrs.frozen
class Memory:
    """In bytes."""

    total: int
    """The machine's memory, or the control group's limit if that is less."""
    available: int
    """What can be allocated now without swapping or being killed."""


def usable_cpus(root: Path = _ROOT) -> int:
    """Return how many CPUs this process may keep busy: those of its affinity mask, or its quota if that is less.

    The quota is rounded down (to at least 1): threads that wait for one another are all delayed if one is throttled.
    """
    quota = min(_cpu_quotas(root), default=None)
    in_mask = len(os.sched_getaffinity(0))
    return in_mask if quota is None else max(1, min(in_mask, int(quota)))


def memory(root: Path = _ROOT) -> Memory:
    """Return this process's memory limits. Raises OSError if /proc/meminfo cannot be read."""
    info = _fields(root / "proc/meminfo")
    total, available = info["MemTotal"] << 10, info["MemAvailable"] << 10
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is None or limit >= total:
            continue
        # the page cache counts as used, but is reclaimed when needed
        stat = _fields(folder / "memory.stat")
        files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        total, available = limit, min(available, max(0, limit - used + files))
    return Memory(total, min(total, available))


def resident() -> int:
    """Return the bytes of anonymous memory that this process has touched."""
    return _status("RssAnon")


def peak_of(run: Callable[[], object]) -> int:
    """Return by how many bytes `run` raised this process's memory at its peak, including what it leaves allocated."""
    _give_back_holes()
    before, peak = _status("VmRSS"), "VmHWM"
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    except OSError:
        peak = "VmRSS"  # what stays allocated is nearly all of it: a backend keeps its memory between passes
    run()
    return max(0, _status(peak) - before)


def _give_back_holes() -> None:
    """Return freed memory from glibc's heap to the system; allocations from it would not show in the peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota of each control group of this process."""
    for folder in _groups(root, "cpu"):
        both = _words(folder / "cpu.max")  # version 2: quota (or "max") and period
        if len(both) != 2:
            both = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0].isdigit() and both[1].isdigit() and int(both[1]) > 0:
            yield int(both[0]) / int(both[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, from its own up to the root.

    In a container, /proc/self/cgroup may have the group's name outside of it; then only the root exists, which is the
    container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controller]
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))
        for mount in mounts:
            yield from dict.fromkeys(mount / part for part in (path, *path.parents))


def _status(name: str) -> int:
    """Return an amount of this process's memory in bytes."""
    return _fields(Path("/proc/self/status"))[name] << 10


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of `name: number` or `name number`; return nothing for a file that does not exist."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None
