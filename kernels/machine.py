"""What this machine lets one process have: processors and memory, with what its control groups take away.

`backend.py` asks for the number of threads before torch loads, `kv_cache_size.py` and the backends for memory. Linux
only; both versions of control groups, where they are usually mounted. No torch here.

What must always hold: a limit that cannot be read is no limit; nothing here is ever more than the machine has.
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
    """Bytes."""

    total: int
    """The machine's, or what the control group allows where that is less."""
    available: int
    """What can be taken now without swapping or being killed."""


def usable_cpus(root: Path = _ROOT) -> int:
    """Processors that this process may keep busy: those of its affinity mask, or its quota where that is less.

    Part of a processor counts as none (but for the first): threads that wait for one another run in step only as long
    as none of them is stopped for having used up the quota.
    """
    quota = min(_cpu_quotas(root), default=None)
    in_mask = len(os.sched_getaffinity(0))
    return in_mask if quota is None else max(1, min(in_mask, int(quota)))


def memory(root: Path = _ROOT) -> Memory:
    """Raises OSError where /proc/meminfo cannot be read."""
    info = _fields(root / "proc/meminfo")
    total, available = info["MemTotal"] << 10, info["MemAvailable"] << 10
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is None or limit >= total:
            continue
        # the cache of files counts as used, but gives way
        stat = _fields(folder / "memory.stat")
        files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        total, available = limit, min(available, max(0, limit - used + files))
    return Memory(total, min(total, available))


def resident(root: Path = _ROOT) -> int:
    """Bytes of memory that this process has touched and that no file stands behind."""
    return _fields(root / "proc/self/status")["RssAnon"] << 10


def peak_of(run: Callable[[], object]) -> int:
    """Bytes by which `run` raised this process's memory at its highest, what it leaves behind included."""
    _give_back_holes()
    before = _fields(Path("/proc/self/status"))["VmRSS"]
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        run()  # what is left behind is nearly all of it: a backend keeps its memory between passes
        return max(0, _fields(Path("/proc/self/status"))["VmRSS"] - before) << 10
    run()
    return max(0, _fields(Path("/proc/self/status"))["VmHWM"] - before) << 10


def _give_back_holes() -> None:
    """Return to the system what was freed and kept for later (glibc): memory taken from there would not show."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Processors that each control group around this process is allowed."""
    for folder in _groups(root, "cpu"):
        both = _words(folder / "cpu.max")  # version 2: quota (or "max") and period
        if len(both) != 2:
            both = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(both) == 2 and both[0].isdigit() and both[1].isdigit() and int(both[1]) > 0:
            yield int(both[0]) / int(both[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own up to the root.

    Within a container the name in /proc/self/cgroup may be the one outside; then only the root is there to be read,
    which is the container's own.
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


def _fields(path: Path) -> dict[str, int]:
    """`name: number` or `name number` lines; nothing of a file that cannot be read, unless it is one of /proc."""
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
