"""Lets vLLM's runner V2 run without a GPU: its Triton kernels in the interpreter, its streams and events as no-ops.

Before the first import of Triton or vLLM, TRITON_INTERPRET=1 must be set and `install` called. Everything then runs at
once and in order: this shows that messages, sampling and bookkeeping are right, not that anything overlaps.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from quipu.kernels.vllm_runner import followers

_HAS_GPU = torch.cuda.is_available()
CHOSEN = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1" if _HAS_GPU else "0") == "1"
"""Whether these tests run V2."""
INTERPRETED = CHOSEN and not _HAS_GPU
"""Whether they do so on the stand-ins."""


class Idle:
    """A stream or an event that has nothing to wait for."""

    def __init__(self, *arguments: object, **named: object) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass


def install() -> None:
    """Put the stand-ins where vLLM looks. Raises RuntimeError if Triton would compile."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("runner V2 needs a GPU, or TRITON_INTERPRET=1")
    import torch._dynamo.config as dynamo
    from triton.backends import backends

    dynamo.disable = True  # the compiler finds no Triton that compiles; with several ranks vLLM compiles an operation

    registered: Any = backends
    registered["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Idle
    setattr(torch, "Event", Idle)  # noqa: B010 - a class of torch's, to its type checker
    cuda.current_stream = lambda *arguments: Idle()
    cuda.set_stream = lambda *arguments: None
    cuda.stream = lambda stream: Idle()
    followers.MODULE = "tests.vllm_runner.v2_rank"  # so that other ranks install them, too
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
