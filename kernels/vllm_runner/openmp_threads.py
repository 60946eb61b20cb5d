"""Ends the OpenMP threads of the thread that has loaded the model, because another thread runs its passes.

Called by `vllm_loading.py` where the CPU computes. Each thread that computes has OpenMP threads of its own, which stay.
Once a process has more of them than processors, libgomp has all of them sleep between parallel regions, of which a pass
of vLLM's has hundreds, instead of spinning for a moment: a step of a 0.6B model on two cores then takes a fifth longer.

What must always hold: where there is no libgomp, or an old one, nothing happens.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

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
