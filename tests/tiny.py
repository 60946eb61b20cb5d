"""The checkpoint of the tests: a tiny Qwen3 with random weights, made by `tests/checkpoints/make_tiny.py`.

Servers offer it under the name `demo`, like the model that is part of the package.

`QUIPU_TEST_EXECUTOR=vllm` has the tests run on vLLM's model runner, in an environment that has it: servers with
`--executor vllm`, runtimes with the backend of `tests/vllm_runner/fake_over_vllm.py`. Blocks are then larger.
"""

from __future__ import annotations

import os
from pathlib import Path

TINY = Path(__file__).resolve().parent / "checkpoints" / "tiny"
EXECUTOR = os.environ.get("QUIPU_TEST_EXECUTOR", "")
"""The executor under test; empty: what each test is written for."""
BLOCK = 32 if EXECUTOR == "vllm" else 16
"""Tokens in a block: the default, or the least that vLLM's attention takes on CPUs."""
BLOCK_BYTES = 8 * BLOCK + (2 * 4 * 2 * 32 * 4 * BLOCK if EXECUTOR == "vllm" else 0)
"""Of the fake executor's KV, and of the tiny model's in float32 (layers, KV heads, head size) if vLLM runs beneath."""


def full_blocks(num_tokens: int) -> int:
    """Return the number of tokens in the full blocks of `num_tokens` tokens."""
    return num_tokens // BLOCK * BLOCK
