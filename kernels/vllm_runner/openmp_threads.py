"""OpenMP threads where vLLM computes on the CPU: those of the loading are ended, those of the passes are kept apart.

Each thread that computes has OpenMP threads of its own, which stay. Once a process has more of them than processors,
libgomp has all of them sleep between parallel regions, of which a pass of vLLM's has hundreds, instead of spinning for
a moment: a step of a 0.6B model on two cores then takes a fifth longer. So `vllm_loading.py` ends those of the thread
that has loaded the model. Before the first pass, `vllm_backend.py` settles how many threads compute it (ranks divide
those of an engine) and, with one rank, gives each of them a processor of its own: where anything else runs, the system
now and then puts two on one, where they wait for each other.

What must always hold: where there is no libgomp, or an old one, nothing happens; threads are kept apart only if there
is one for each processor, so that none that is idle is out of reach.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0: may free everything; what is needed later is made again


def end_own_threads(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """End the OpenMP threads of the calling thread. Return the libraries that have been asked to."""
    asked = []
    with suppress(OSError):
        lines = maps.read_text("utf-8", "replace").splitlines()
        for path in sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}):
            with suppress(OSError, AttributeError):
                ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)
                asked.append(path)
    return asked


def settle_own_threads() -> None:
    """Have the calling thread compute with as many OpenMP threads as torch is set to use.

    torch does so in each thread at its first parallel operation. vLLM plans its attention before that, and refuses to
    compute it with another number of threads.
    """
    torch.set_num_threads(torch.get_num_threads())


def keep_own_threads_apart(num_threads: int, library: Path = _TORCH) -> bool:
    """Bind the calling thread and its OpenMP threads to a processor each. Return whether that was done.

    `library`: one that computes with them. Other packages bring OpenMP libraries of their own.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) != num_threads or os.environ.get(_BINDING) == "nobind":
        return False
    try:
        symbols = ctypes.CDLL(str(library))  # those of what it is linked with, too
        parallel, own_number = symbols.GOMP_parallel, symbols.omp_get_thread_num
    except (OSError, AttributeError):
        return False

    def bind(_: int | None) -> None:
        os.sched_setaffinity(0, {cpus[own_number()]})

    # what a compiler makes of `#pragma omp parallel num_threads(n)`
    parallel.argtypes = (ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel(parallel.argtypes[0](bind), None, num_threads, 0)
    return True
