"""What an exception that a pass raised says about the next one: too little memory, or a process that cannot go on.

Without torch: errors are told apart by the names of their types and by their messages, which are those of torch, Triton
and the CUDA runtime. Contexts are lost by the errors after which the CUDA Runtime API demands a new process.
"""

from __future__ import annotations

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, Triton's launcher
    "can't allocate memory",  # torch on the CPU
    "cublas_status_alloc_failed",
    "std::bad_alloc",
)
_FROM_DEVICE = ("cuda error", "triton error [cuda]", "cudaerror", "hip error")
_CONTEXT_LOST = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "the launch timed out and was terminated",
    "uncorrectable ecc error encountered",
    "uncorrectable nvlink error",
    "context is destroyed",
    "invalid device context",
    "no cuda-capable device is detected",
    "device(s) is/are busy or unavailable",
)


class RunnerDiverged(RuntimeError):
    """The library that runs a backend's passes has another idea of its sequences than the batch.

    Raised by a backend. No result of this process may be trusted from then on: the engine is started again.
    """


class RankLost(RuntimeError):
    """One of the processes that compute a pass together has ended, or has failed while others wait for it.

    Raised by a backend. None of them can go on: the engine is started again, with all of them.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was not enough memory for a pass, so that a smaller one may fit."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in _OUT_OF_MEMORY)


def is_context_lost(error: BaseException) -> bool:
    """Return whether no later pass of this process can succeed: its context on the device, or its state, is lost."""
    if isinstance(error, RunnerDiverged | RankLost):
        return True
    message = str(error).lower()
    return (
        isinstance(error, RuntimeError)
        and any(part in message for part in _FROM_DEVICE)
        and any(part in message for part in _CONTEXT_LOST)
    )
