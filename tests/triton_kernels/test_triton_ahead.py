"""What the compiler makes of the kernels for sm_90, without a GPU: shared memory, instructions, registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
"""What a program can have on sm_90."""
SPILLING = {"prefill 8/4 heads of 256, window, soft cap", "shared prefill 8/4 heads of 256, window, soft cap", "draw"}
"""Two sums of 256 numbers a row do not fit. The sampler saves some around a division of doubles, outside its loops."""

pytestmark = pytest.mark.timeout(900)  # all kernels are compiled, once


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Every kernel by name. In a process without the interpreter, which would leave nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("ahead.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {kernel["name"]: kernel for kernel in json.loads(done.stdout)}


def test_shared_memory(compiled: dict[str, dict[str, Any]]) -> None:
    """Every kernel can be launched."""
    assert len(compiled) > 30
    assert {name: k["shared_bytes"] for name, k in compiled.items() if k["shared_bytes"] > SHARED_BYTES} == {}


def test_instructions(compiled: dict[str, dict[str, Any]]) -> None:
    """Products are the tensor cores', a warp group's (wgmma) where a tile has 64 rows; their arguments are copied while
    others are multiplied."""
    for name, kernel in compiled.items():
        many_rows = name.startswith(("prefill", "linear", "slices", "pairs"))
        few_rows = name.startswith(("decode ", "shared prefill")) and not name.startswith("decode sum")
        if "float32" in name:
            continue  # in full precision there are no such instructions
        assert bool(kernel["wgmma"]) == many_rows, name
        assert bool(kernel["mma"]) == few_rows, name
        assert bool(kernel["async_copies"]) == (many_rows or few_rows), name


def test_registers(compiled: dict[str, dict[str, Any]]) -> None:
    """Nothing is spilled but where it is known."""
    assert {name for name, kernel in compiled.items() if kernel["spills"]} <= SPILLING


def test_nothing_is_contracted(compiled: dict[str, dict[str, Any]]) -> None:
    """No product and sum became one in what decode and prefill share: there the compiler could choose differently."""
    shared = {name: k for name, k in compiled.items() if k["name"].startswith(("decode", "prefill", "shared"))}
    assert len(shared) >= 16
    assert {name for name, kernel in shared.items() if kernel["contracted"] and "float32" not in name} == set()
