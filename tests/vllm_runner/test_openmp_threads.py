"""OpenMP threads of a thread that computes no longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quipu.kernels.vllm_runner.openmp_threads import end_own_threads

COMPUTE = """
import os, torch
from quipu.kernels.vllm_runner.openmp_threads import end_own_threads

torch.set_num_threads(3)
product = torch.ones(999, 999) @ torch.ones(999, 999)
before = len(os.listdir("/proc/self/task"))
asked = end_own_threads()
after = len(os.listdir("/proc/self/task"))
assert torch.equal(torch.ones(999, 999) @ torch.ones(999, 999), product)
print(len(asked), before - after)
"""


def test_threads_end() -> None:
    """They end, and are made again where they are needed; without libgomp, nothing is asked."""
    done = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, check=True)
    num_asked, num_ended = map(int, done.stdout.split())
    assert num_ended == (2 if num_asked else 0)


def test_no_library(tmp_path: Path) -> None:
    """A process without libgomp, or without a list of its libraries, is left alone."""
    assert end_own_threads(tmp_path / "missing") == []
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 1 {tmp_path}/libgomp.so.1\n")
    assert end_own_threads(maps) == []
