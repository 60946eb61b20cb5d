"""Whether this machine can run Triton's kernels, asked before anything of Triton or CUDA is loaded; and what has to
stand in the environment by then."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

_LEAST_CAPABILITY = (8, 0)  # asynchronous copies and bfloat16 products

_STRICT = {
    # cuBLAS otherwise splits K where memory allows, by the number of rows (NVIDIA: "cuBLAS API", results
    # reproducibility)
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}


class NotForTriton(Exception):
    """The GPU is one that the triton executor does not run on; the message says why."""


def why_not() -> str | None:
    """What is missing, or None. Does not start CUDA."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'quipu-llm[triton]')"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def check_capability() -> None:
    """Starts CUDA. Raises NotForTriton for a GPU that is too old."""
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        raise NotForTriton(f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0")


def ask_for_strict() -> bool:
    """Set what cuBLAS reads when CUDA starts. False where it has started without."""
    import torch

    cuda: Any = torch.cuda  # torch gives no types to part of it
    asked = all(os.environ.get(name) == value for name, value in _STRICT.items())
    if not asked and cuda.is_initialized():
        return False
    os.environ.update(_STRICT)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return True
