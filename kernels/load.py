"""The choice of a backend.

The executor calls `load_backend` once, at start. A backend's module is imported only when it is chosen, so that nobody
loads torch or Triton without need.
"""

from __future__ import annotations

import logging
import os

from .backend import Backend, BackendConfig
from .machine import usable_cpus

_log = logging.getLogger(__name__)


def load_backend(name: str, config: BackendConfig) -> Backend:
    """Make the backend called `name`: `cpu`, `triton`, `reference` or `fake`.

    `auto` is `triton` where there is a GPU for it, else `cpu` where that can run, else `reference`.

    Raises ValueError for an unknown name, an unsupported architecture or a checkpoint that does not fit its config, and
    for `cpu` and `triton` where this machine cannot run them.
    """
    if name == "fake":
        from .fake import FakeBackend

        return FakeBackend(config)
    if name not in ("auto", "cpu", "reference", "triton"):
        raise ValueError(f"unknown backend {name!r}: choose 'auto', 'cpu', 'triton', 'reference' or 'fake'")
    # Read once, when torch brings its OpenMP in. Idle threads that spin instead of sleeping made a step of a small
    # model on two cores sixty times slower beside a busy neighbour; sleeping costs 13 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))  # read then, too
    if name == "reference":
        return _load_reference(config)
    if name in ("auto", "triton"):
        from .triton.availability import TritonUnavailable, why_unavailable

        missing = why_unavailable()
        if missing is None:
            from .triton.triton_backend import TritonBackend

            try:
                return TritonBackend(config)
            except TritonUnavailable as error:
                missing = str(error)
        if name == "triton":
            raise ValueError(f"the triton executor cannot run here: {missing}")
    from .cpu.cpu_backend import CpuBackend, CpuKernelsUnavailable

    try:
        backend = CpuBackend(config)
        _log.info("the cpu executor runs on %s", backend.capabilities.instruction_set)
        return backend
    except CpuKernelsUnavailable as error:
        if name == "cpu":
            raise ValueError(f"the cpu executor cannot run here: {error}") from None
        _log.warning("the reference executor runs, many times slower than the cpu executor would: %s", error)
    return _load_reference(config)


def _load_reference(config: BackendConfig) -> Backend:
    from .reference.reference_backend import ReferenceBackend

    return ReferenceBackend(config)
