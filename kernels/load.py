"""The choice of a backend.

The executor calls `load_backend` once, at start. A backend's module is imported only when it is needed: the fake one
must run without torch, the CPU's without Triton.
"""

from __future__ import annotations

import logging
import os

from .backend import QUANTIZED_BY_VLLM, Backend, BackendConfig
from .machine import usable_cpus

OWN_EXECUTORS = ("cpu", "triton", "reference")
"""Those that run every family of `models/`."""
_log = logging.getLogger(__name__)


def load_backend(name: str, config: BackendConfig) -> Backend:
    """Make the backend called `name`: `cpu`, `triton`, `vllm`, `transformers`, `reference` or `fake`.

    `auto` is `triton` if there is a supported GPU, else `cpu` if it can run here, else `reference`.

    Raises ValueError for an unknown name, an unsupported architecture or a checkpoint that does not match its config,
    and for `cpu`, `triton`, `vllm` or `transformers` if this machine cannot run it.
    """
    if config.draft_model is not None and name not in ("auto", *OWN_EXECUTORS):
        raise ValueError(f"--draft-model: the {name} executor runs none; cpu, triton and reference do")
    if config.ignored_config_entries and name not in ("auto", *OWN_EXECUTORS):
        raise ValueError(
            f"--ignore-config-entries: the {name} executor does not check entries; cpu, triton and reference do"
        )
    if name != "vllm":
        _refuse_what_only_vllm_has(name, config)
    if name == "fake":
        from .fake import FakeBackend

        return FakeBackend(config)
    if name not in ("auto", *OWN_EXECUTORS, "transformers", "vllm"):
        raise ValueError(
            f"unknown backend {name!r}: choose 'auto', 'cpu', 'triton', 'vllm', 'transformers', 'reference' or 'fake'"
        )
    # Both are read once, when torch loads OpenMP. With idle threads that spin instead of sleeping, a step of a small
    # model on two cores was sixty times slower beside a busy process; sleeping costs 13 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    if name == "reference":
        return _load_reference(config)
    if name == "vllm":
        _refuse_adapters(name, config)
        from .vllm_runner.vllm_backend import VllmBackend

        return VllmBackend(config)
    if name == "transformers":
        _refuse_adapters(name, config)
        from .transformers_runner.transformers_backend import TransformersBackend

        return TransformersBackend(config)
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
        _log.warning("using the reference executor, which is many times slower than the cpu executor: %s", error)
    return _load_reference(config)


def _refuse_what_only_vllm_has(name: str, config: BackendConfig) -> None:
    """Raises ValueError for settings that this backend would ignore."""
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: the {name} executor computes on one device; only "
            f"--executor vllm divides a model among several"
        )
    if config.quantization in QUANTIZED_BY_VLLM:
        raise ValueError(
            f"--quantization {config.quantization}: the {name} executor has no such method; only --executor vllm does"
        )
    if config.trust_remote_code and name != "transformers":
        raise ValueError(
            f"--trust-remote-code: the {name} executor runs no code of a checkpoint; only --executor vllm and "
            f"--executor transformers can"
        )


def _refuse_adapters(name: str, config: BackendConfig) -> None:
    """Raises ValueError if adapters are asked of a backend that applies none."""
    if config.max_loras:
        raise ValueError(f"--enable-lora: the {name} executor applies no adapters; cpu, triton and reference do")


def _load_reference(config: BackendConfig) -> Backend:
    from .reference.reference_backend import ReferenceBackend

    return ReferenceBackend(config)
