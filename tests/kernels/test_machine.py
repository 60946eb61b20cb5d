"""The CPUs and memory that affinity and control groups (v1 and v2) allow, from test files and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quipu.kernels.machine import Memory, memory, peak_of, resident, usable_cpus

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB >> 10} kB\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an affinity mask of eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


V2 = "0::/a/b\n"
V1 = "5:memory:/a\n4:cpu,cpuacct:/a\n1:name=systemd:/a\n0::/\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": V2}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "390000 100000"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "1600000 100000"}, 8),
        # the most restrictive ancestor group
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 1", "sys/fs/cgroup/a/cpu.max": "2 1"}, 2),
        # a container whose own group is mounted as the root, but listed under its name on the host
        ({"proc/self/cgroup": "0::/kube/pod7\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/unified/a/b/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "nonsense"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
)
def test_quota(tmp_path: Path, eight: None, files: dict[str, str], expected: int) -> None:
    """Apply the lowest quota of the process's groups, rounded down, but at least one CPU."""
    write(tmp_path, files)
    assert usable_cpus(tmp_path) == expected


def test_affinity() -> None:
    """Count only the CPUs in the affinity mask."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from quipu.kernels.machine import usable_cpus; print(usable_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Memory(16 * GIB, 12 * GIB)),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/memory.max": "max"}, Memory(16 * GIB, 12 * GIB)),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/a/b/memory.max": str(4 * GIB),
                "sys/fs/cgroup/a/b/memory.current": str(3 * GIB),
                "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            Memory(4 * GIB, 3 * GIB),
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            },
            Memory(2 * GIB, GIB + GIB // 2),
        ),
        (
            # how version 1 writes that there is no limit
            {"proc/self/cgroup": V1, "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"},
            Memory(16 * GIB, 12 * GIB),
        ),
        (
            # the machine has less available than the group
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/a/memory.max": str(15 * GIB),
                "sys/fs/cgroup/a/memory.current": "0",
            },
            Memory(15 * GIB, 12 * GIB),
        ),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], expected: Memory) -> None:
    """Return the lowest limit, and what is available of it, counting page cache as available."""
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert memory(tmp_path) == expected


def test_this_machine() -> None:
    """Return plausible values on the machine that runs this test."""
    found = memory()
    assert 0 < resident() < found.total
    assert 0 < found.available <= found.total
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_peak() -> None:
    """Measure the peak, including memory that is already freed."""
    size = 64 << 20

    def allocate() -> None:
        bytearray(size)[::4096] = bytes(size // 4096)

    assert size * 0.9 <= peak_of(allocate) <= size * 1.5
