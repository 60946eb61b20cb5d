"""The Triton kernels in Triton's interpreter: collected only by `make test-triton`, which sets TRITON_INTERPRET.

The interpreter takes seconds where a GPU takes microseconds, and Triton is an optional dependency; so `make test` skips
these tests, whether Triton is installed or not. (A folder called `triton` would be mistaken for the package.)
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the float32 checkpoints that the CPU backends are tested with, each when first requested."""
    from tests.kernels.kernel_checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products treat all rows of a tile the same, as a GPU is assumed to: numpy's do not."""
    from triton.runtime import interpreter

    from tests.gpu.interpreted import create_dot

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
