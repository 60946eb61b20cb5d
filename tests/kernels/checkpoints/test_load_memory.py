"""Loading takes little more memory than the weights, measured in a process of its own with 260 MB and 520 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.kernels.checkpoints.load_memory import make_large
from tests.kernels.cpu.cpu_backends import needs_kernels

MEASURE = Path(__file__).with_name("load_memory.py")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make each large checkpoint when it is first requested."""
    root = tmp_path_factory.mktemp("large")
    return cache(lambda name: make_large(root / name, getattr(torch, name)))


@pytest.mark.parametrize(
    ("stored", "executor", "dtype"),
    [
        pytest.param("bfloat16", "cpu", "auto", marks=needs_kernels),
        pytest.param("float32", "cpu", "auto", marks=[needs_kernels, pytest.mark.slow]),
        pytest.param("float32", "cpu", "bfloat16", marks=[needs_kernels, pytest.mark.slow]),
        pytest.param("bfloat16", "reference", "auto", marks=pytest.mark.slow),
        pytest.param("float32", "reference", "auto", marks=pytest.mark.slow),
    ],
)
def test_peak_is_at_most_1_3_times_weights(
    large: Callable[[str], Path], stored: str, executor: str, dtype: str
) -> None:
    """Peak at no more than 1.3 times the weights in memory, including pages of the mapped file.

    The reference holds four bytes per weight, whatever the dtype of the file; its bound is relative to that.
    """
    command = [sys.executable, str(MEASURE), str(large(stored)), executor, dtype]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    width = 4 if executor == "reference" or (stored, dtype) == ("float32", "auto") else 2
    assert found["weights"] == pytest.approx(130_030_000 * width, rel=0.01)
    assert found["left"] >= 0.99 * found["weights"], "the weights were not loaded"
    assert found["peak"] <= 1.3 * found["weights"]
    assert found["peak_anonymous"] <= 1.3 * found["weights"]


@needs_kernels
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantizing_takes_little_memory(large: Callable[[str], Path], quantization: str) -> None:
    """Quantize while loading with at most 1.1 times the anonymous memory that is left in the end."""
    command = [sys.executable, str(MEASURE), str(large("bfloat16")), "cpu", "auto", quantization]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["left"] >= 0.99 * found["weights"], "the weights were not loaded"
    assert found["peak_anonymous"] <= 1.1 * found["left_anonymous"]
