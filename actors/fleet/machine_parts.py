"""What this machine has for engines: processors by core, GPUs, memory. Read without torch.

`engine_shares.py` divides it among the engines of one server. Linux only.

What must always hold: no processor, GPU or byte is reported that this process may not use; what cannot be read is
ignored.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from quipu.kernels.machine import memory, usable_cpus

_ROOT = Path("/")

Core = tuple[int, ...]
"""The CPUs of one physical core that this process may use: several with hyperthreading."""


@attrs.frozen
class Machine:
    cores: tuple[Core, ...]
    """Those of one NUMA node next to each other."""
    num_usable_cpus: int
    """How many CPUs may be kept busy: fewer than there are under a quota."""
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them."""
    has_triton: bool = False
    """Without it the executor `auto` does not use GPUs."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for core in self.cores for cpu in core)


def read_machine(environment: Mapping[str, str]) -> Machine:
    """Return what this process may use, and what `environment` leaves visible."""
    return Machine(
        cores=read_cores(os.sched_getaffinity(0)),
        num_usable_cpus=usable_cpus(),
        gpus=visible_gpus(environment),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def available_memory() -> int | None:
    """Return how many bytes of the host's memory can be allocated now; None if that cannot be read."""
    try:
        return memory().available
    except (OSError, KeyError):
        return None


def read_cores(cpus: Iterable[int], root: Path = _ROOT) -> tuple[Core, ...]:
    """Return these CPUs by physical core, and the cores by NUMA node. Where /sys is silent, each CPU is a core."""
    allowed = set(cpus)
    folder = root / "sys/devices/system"
    nodes = {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in folder.glob("node/node[0-9]*/cpulist")
        for cpu in _cpu_list(path)
    }
    cores = {
        tuple(sorted({cpu, *_cpu_list(folder / f"cpu/cpu{cpu}/topology/thread_siblings_list")} & allowed))
        for cpu in allowed
    }
    return tuple(sorted(cores, key=lambda core: (nodes.get(core[0], 0), core)))


def visible_gpus(environment: Mapping[str, str], root: Path = _ROOT) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that CUDA would show to a process with this environment, in its order.

    CUDA_VISIBLE_DEVICES has numbers or UUIDs; what follows an invalid entry, such as -1, is invisible.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, range(len(list(root.glob("dev/nvidia[0-9]*"))))))
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return tuple(names)


def _cpu_list(path: Path) -> list[int]:
    """Parse a list such as `0-3,8`; return nothing for a file that cannot be read."""
    try:
        text = path.read_text().strip()
        parts = [part.split("-") for part in text.split(",") if part]
        return [cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)]
    except (OSError, ValueError):
        return []
