"""Tests of `--executor vllm`. `make test` collects those that need no vLLM, `make test-vllm` all.

With `QUIPU_TEST_EXECUTOR=vllm`, a process has one backend for all its engines (`shared_vllm.py`), and only the
tests that use it are collected.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.kernel_checkpoints import make_checkpoint
from tests.tiny import EXECUTOR
from tests.vllm_runner import v2_stand_ins
from tests.vllm_runner.vllm_backends import MISSING, close_all

if v2_stand_ins.INTERPRETED:
    v2_stand_ins.install()

ON_THE_SHARED_ONE = "test_vllm_faults.py"
collect_ignore = [] if EXECUTOR == "vllm" else [ON_THE_SHARED_ONE]
if MISSING:
    collect_ignore += [f"test_vllm_{part}.py" for part in ("backend", "engine", "models", "ranks", "served")]
elif EXECUTOR == "vllm":
    collect_ignore += [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != ON_THE_SHARED_ONE]
if MISSING or not v2_stand_ins.CHOSEN:
    collect_ignore.append("test_v2_ahead.py")


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
