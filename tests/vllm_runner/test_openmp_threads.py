"""OpenMP threads of a thread that computes no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quipu.kernels.vllm_runner.openmp_threads import end_own_threads, keep_own_threads_apart

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

SETTLE = """
import ctypes, threading, torch
from quipu.kernels.vllm_runner.openmp_threads import _TORCH, settle_own_threads

most = ctypes.CDLL(str(_TORCH)).omp_get_max_threads
torch.set_num_threads(1)

def compute():
    before = most()
    settle_own_threads()
    print(before, most())

thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""

BIND = """
import os, threading, torch
from quipu.kernels.vllm_runner.openmp_threads import keep_own_threads_apart

cpus = os.sched_getaffinity(0)
asked_for = len(cpus) + int(os.environ["MORE"])
torch.set_num_threads(asked_for)

def compute():
    before = {int(task) for task in os.listdir("/proc/self/task")}
    done = keep_own_threads_apart(asked_for)
    torch.ones(999, 999) @ torch.ones(999, 999)
    mine = {int(task) for task in os.listdir("/proc/self/task")} - before | {threading.get_native_id()}
    masks = sorted(tuple(sorted(os.sched_getaffinity(task))) for task in mine)
    print(done, masks == sorted((cpu,) for cpu in cpus), masks == [tuple(sorted(cpus))] * asked_for)

thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(os.sched_getaffinity(0) == cpus)
"""


@pytest.mark.parametrize(
    ("more", "binding", "done"), [("0", "", True), ("1", "", False), ("0", "nobind", False), ("0", "auto", True)]
)
def test_threads_apart(more: str, binding: str, done: bool) -> None:
    """Those of one thread get a processor each if there are as many; others, and other threads, may run anywhere."""
    environment = {**os.environ, "MORE": more, "VLLM_CPU_OMP_THREADS_BIND": binding}
    ran = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True, env=environment)
    bound, apart, anywhere, others = (word == "True" for word in ran.stdout.split())
    assert (bound, others) == (done, True)
    assert apart if done else anywhere


def test_number_in_a_new_thread() -> None:
    """What torch was told in another thread holds before its first operation, too."""
    command, environment = [sys.executable, "-c", SETTLE], {**os.environ, "OMP_NUM_THREADS": "2"}
    assert subprocess.check_output(command, text=True, env=environment) == "2 1\n"


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
    assert not keep_own_threads_apart(len(os.sched_getaffinity(0)), tmp_path / "missing")
