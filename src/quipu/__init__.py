"""quipu: an LLM inference server that keeps books.

`actors/`, `kernels/` and `web/` are importable only as `quipu.actors`, `quipu.kernels` and `quipu.web`; the links
beside this file make them so in a checkout, and the wheel holds them as ordinary folders. The names of the Python API
(`web/library/`) are loaded when they are first used, so that `import quipu` loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quipu.web.library.async_llm import AsyncLLM
    from quipu.web.library.library_errors import EngineError, RequestError
    from quipu.web.library.llm import LLM
    from quipu.web.library.outputs import CompletionOutput, RequestOutput, Usage
    from quipu.web.library.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Usage",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineError": "library_errors",
    "RequestError": "library_errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Usage": "outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"quipu.web.library.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
