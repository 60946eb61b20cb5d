"""Properties of the kernels compiled for sm_90, without a GPU: shared memory, instructions, registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
"""The most shared memory that a program can use on sm_90."""
SPILLING = {
    "prefill 8/4 heads of 256, window, soft cap",
    "shared prefill 8/4 heads of 256, window, soft cap",
    "shared prefill 16/1 heads of 576",
    "draw",
}
"""Kernels known to spill: two sums of 256 numbers per row, or more, do not fit, and the sampler spills around a
division of doubles, outside its loops."""

pytestmark = pytest.mark.timeout(900)  # all kernels are compiled once


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Return every compiled kernel by name; compile in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("ahead.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {kernel["name"]: kernel for kernel in json.loads(done.stdout)}


def test_shared_memory(compiled: dict[str, dict[str, Any]]) -> None:
    """Keep every kernel's shared memory within the limit, so that it can be launched."""
    assert len(compiled) > 30
    assert {name: k["shared_bytes"] for name, k in compiled.items() if k["shared_bytes"] > SHARED_BYTES} == {}


def test_instructions(compiled: dict[str, dict[str, Any]]) -> None:
    """Use tensor cores for products, with wgmma if a tile has 64 rows; copy operands asynchronously meanwhile."""
    for name, kernel in compiled.items():
        many_rows = name.startswith(("prefill", "linear", "slices", "pairs"))
        few_rows = name.startswith(("decode ", "shared prefill", "shrink", "expand"))
        few_rows &= not name.startswith("decode sum")
        if "float32" in name:
            continue  # there are no such instructions for full precision
        assert bool(kernel["wgmma"]) == many_rows, name
        assert bool(kernel["mma"]) == few_rows, name
        # what expands a rank of 16 has no loop to copy ahead in
        assert bool(kernel["async_copies"]) == (many_rows or (few_rows and not name.startswith("expand"))), name


def test_registers(compiled: dict[str, dict[str, Any]]) -> None:
    """Spill registers only in the kernels that are known to."""
    assert {name for name, kernel in compiled.items() if kernel["spills"]} <= SPILLING


def test_nothing_is_contracted(compiled: dict[str, dict[str, Any]]) -> None:
    """Contract nothing in what decode and prefill share, since the compiler could choose differently in each."""
    shared = {name: k for name, k in compiled.items() if k["name"].startswith(("decode", "prefill", "shared"))}
    assert len(shared) >= 16
    assert {name for name, kernel in shared.items() if kernel["contracted"] and "float32" not in name} == set()
