"""When the Triton executor is chosen. Triton itself is not needed: its own tests are in `tests/triton_kernels`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quipu.kernels.load import load_backend
from quipu.kernels.triton import availability
from tests.kernels.kernel_checkpoints import backend_config


class FakeTritonBackend:
    """Replaces the executor; raises if `too_old` is set."""

    too_old = False

    def __init__(self, config: object) -> None:
        if self.too_old:
            raise availability.TritonUnavailable("the GPU is too old")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeTritonBackend]:
    """Pretend that the machine has a CUDA device and Triton."""
    module = ModuleType("quipu.kernels.triton.triton_backend")
    fake = type("FakeTritonBackend", (FakeTritonBackend,), {})
    setattr(module, "TritonBackend", fake)  # noqa: B010 - mypy lets no method be assigned
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(availability, "why_unavailable", lambda: None)
    return fake


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_chosen_if_there_is_a_device(gpu: type[FakeTritonBackend], checkpoints: dict[str, Path], name: str) -> None:
    """Choose Triton by name, and as the first choice of `auto`."""
    assert isinstance(load_backend(name, backend_config(checkpoints["llama"])), gpu)


def test_old_gpu_is_refused(gpu: type[FakeTritonBackend], checkpoints: dict[str, Path]) -> None:
    """Refuse it if requested by name; otherwise use the CPU."""
    gpu.too_old = True
    config = backend_config(checkpoints["llama"])
    with pytest.raises(ValueError, match="cannot run here: the GPU is too old"):
        load_backend("triton", config)
    assert load_backend("auto", config).capabilities.name in ("cpu", "reference")


def test_no_device(monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path]) -> None:
    """Report what is missing if requested by name; otherwise use the CPU silently."""
    monkeypatch.setattr("quipu.kernels.triton.availability.importlib.util.find_spec", lambda name: None)
    config = backend_config(checkpoints["llama"])
    with pytest.raises(ValueError, match="cannot run here: Triton is not installed"):
        load_backend("triton", config)
    assert load_backend("auto", config).capabilities.name in ("cpu", "reference")
    monkeypatch.setattr("quipu.kernels.triton.availability.importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        load_backend("triton", config)


def test_strict_cublas_requires_uninitialized_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads its settings at initialization: report success only if they were set before."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "")
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        assert not availability.request_strict_cublas()
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
        assert availability.request_strict_cublas()
        assert not matmul.allow_bf16_reduced_precision_reduction
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        assert availability.request_strict_cublas()
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = allowed
