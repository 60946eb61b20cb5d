"""Backends that drive an installed vLLM, for the tests here, and the marks of tests that do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from quipu.actors.shared.checkpoint import DEMO
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from quipu.kernels.vllm_runner.vllm_settings import check_installed
from tests.kernels.kernel_checkpoints import backend_config


def _missing_reason() -> str:
    try:
        check_installed()
    except ValueError as error:
        return str(error)
    return ""


MISSING = _missing_reason()
"""Why vLLM cannot be tested here; empty if it can."""
LONGEST_S = 1800.0
"""How long a test or a start may take. On a busy machine, importing vLLM takes minutes; and ranks hardly get on there,
because they spin while they wait for one another."""
vllm_marks = [
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and its dependencies
    pytest.mark.timeout(LONGEST_S),
]
"""The marks of a module whose tests run vLLM."""
SIZE = 32
"""Tokens in a block: the least that vLLM's attention takes on CPUs."""
SERVE_DEMO = (str(DEMO), "--served-model-name", "demo", "--executor", "vllm", "--enforce-eager")
"""Arguments of `quipu serve`."""
_backends: dict[tuple[Any, ...], VllmBackend] = {}


def open_backend(model: Path, **changes: Any) -> VllmBackend:
    """Load a model, or return the backend that has loaded it with the same settings, if it is still the last one.

    It is not compiled unless asked for, because that takes half a minute. vLLM's process groups are those of one model.
    """
    changes = {"enforce_eager": True, **changes}
    key = (model, *sorted(changes.items()))
    if key not in _backends:
        close_all()
        with warnings.catch_warnings(action="ignore"):
            _backends[key] = VllmBackend(backend_config(model, **{"block_size": SIZE, "num_blocks": 160, **changes}))
    return _backends[key]


def close_all() -> None:
    """Close the backends that are open."""
    while _backends:
        _backends.popitem()[1].close()
