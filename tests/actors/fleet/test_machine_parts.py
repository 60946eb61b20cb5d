"""Reading processors and GPUs from /sys, /dev and the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quipu.actors.fleet.machine_parts import available_memory, read_cores, read_machine, visible_gpus
from tests.kernels.test_machine import write

NODE = "sys/devices/system/node/node{}/cpulist"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

PAIRS = {SIBLINGS.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
"""Eight CPUs, in cores of two as Linux numbers them."""
RANGES = {SIBLINGS.format(cpu): f"{cpu & ~1}-{cpu | 1}" for cpu in range(4)}
ODD_AND_EVEN = {NODE.format(0): "0,2,4,6\n", NODE.format(1): "1,3,5,7\n"}
"""Two NUMA nodes."""


@pytest.mark.parametrize(
    ("cpus", "files", "cores"),
    [
        ({3, 0, 7}, {}, ((0,), (3,), (7,))),
        (range(8), PAIRS, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (range(4), RANGES, ((0, 1), (2, 3))),
        # siblings outside of the affinity mask are not used
        ({0, 1, 5}, PAIRS, ((0,), (1, 5))),
        (range(8), ODD_AND_EVEN, ((0,), (2,), (4,), (6,), (1,), (3,), (5,), (7,))),
        (range(8), {**PAIRS, **ODD_AND_EVEN}, ((0, 4), (2, 6), (1, 5), (3, 7))),
        # more than nine nodes are in the order of their numbers
        ({0, 1, 2}, {NODE.format(10): "0", NODE.format(9): "1", NODE.format(2): "2"}, ((2,), (1,), (0,))),
        ({0, 1}, {SIBLINGS.format(0): "nonsense", NODE.format(0): "x-y"}, ((0,), (1,))),
    ],
)
def test_cores(tmp_path: Path, cpus: range, files: dict[str, str], cores: object) -> None:
    """Siblings form a core, the cores of a node are adjacent, and every usable CPU is in exactly one core."""
    write(tmp_path, files)
    assert read_cores(cpus, tmp_path) == cores


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("1, -1, 0", ("1",)),
        ("NoDevFiles", ()),
        ("GPU-8932f937,GPU-d5a6", ("GPU-8932f937", "GPU-d5a6")),
        ("MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_gpus(tmp_path: Path, listed: str | None, gpus: tuple[str, ...]) -> None:
    """The GPUs are those that CUDA would show: all devices, or the list up to its first invalid entry."""
    write(tmp_path, {f"dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm")})
    assert visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == gpus


def test_no_gpus(tmp_path: Path) -> None:
    """A machine without the driver has no GPUs."""
    assert visible_gpus({}, tmp_path) == ()


def test_this_machine() -> None:
    """The cores of this machine are the CPUs of this process, each once; its free memory can be read."""
    machine = read_machine(os.environ)
    assert sorted(machine.cpus) == sorted(os.sched_getaffinity(0))
    assert 1 <= machine.num_usable_cpus <= len(machine.cpus)
    assert (available_memory() or 0) > 0
