"""Whether this machine can run the Triton kernels, and the environment that strict mode needs.

Must not import Triton or start CUDA before it is known that both are there and the environment is set.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

_LEAST_CAPABILITY = (8, 0)  # asynchronous copies and bfloat16 products

_STRICT = {
    # otherwise cuBLAS may split K, depending on the number of rows (NVIDIA: "cuBLAS API", results reproducibility)
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}


class TritonUnavailable(Exception):
    """The triton executor does not run on this GPU; the message says why."""


def why_unavailable() -> str | None:
    """Return what is missing, or None. Does not start CUDA."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install './quipu_llm-….whl[triton]')"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def check_capability() -> None:
    """Start CUDA and raise TritonUnavailable if the GPU is too old."""
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        raise TritonUnavailable(f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0")


def request_strict_cublas() -> bool:
    """Set the environment that cuBLAS reads when CUDA starts. Return False if CUDA has started without it."""
    import torch

    cuda: Any = torch.cuda  # torch does not type all of it
    asked = all(os.environ.get(name) == value for name, value in _STRICT.items())
    if not asked and cuda.is_initialized():
        return False
    os.environ.update(_STRICT)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return True
