"""Which errors of a pass mean too little memory, a lost device, or neither."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quipu.kernels.step_errors import is_context_lost, is_out_of_memory


def raised_by_torch() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


def raised_by_numpy() -> BaseException:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 60, np.uint8)
    return caught.value


def test_out_of_memory() -> None:
    """Each library's error for too little memory is recognized; the context is not lost."""
    for error in (
        raised_by_torch(),
        raised_by_numpy(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert is_out_of_memory(error), error
        assert not is_context_lost(error), error


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
        "Triton Error [CUDA]: misaligned address",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_lost_context(message: str) -> None:
    """A lost context is recognized, whether or not torch has a type for it."""
    for error in (torch.AcceleratorError(message), RuntimeError(message)):
        assert is_context_lost(error)
        assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("out of resource: shared memory, Required: 270336, Hardware limit: 232448"),
        RuntimeError("a tensor has a misaligned address"),
        ValueError("the client wrote: CUDA error: device-side assert triggered"),
        KeyError("out of memory"),
    ],
)
def test_neither(error: Exception) -> None:
    """Errors of one launch, and messages that only look alike, are neither."""
    assert not is_context_lost(error)
    assert not is_out_of_memory(error)
