"""Tests of `--executor vllm`. `make test` collects those that need no vLLM, `make test-vllm` all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.kernel_checkpoints import make_checkpoint
from tests.vllm_runner.vllm_backends import MISSING, close_all

collect_ignore = (
    [f"test_vllm_{part}.py" for part in ("backend", "engine", "models", "ranks", "served")] if MISSING else []
)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a float32 checkpoint of random weights with heads that vLLM's attention takes on CPUs."""
    return make_checkpoint(tmp_path_factory.mktemp("vllm") / "qwen3-tied", "qwen3-tied")


@pytest.fixture(autouse=True, scope="module")
def close_backends() -> Iterator[None]:
    """Free what a module's backends hold, and thaw what vLLM has frozen."""
    yield
    close_all()
    gc.collect()
