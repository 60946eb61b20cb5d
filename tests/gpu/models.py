"""Backends with dummy weights in Qwen3-0.6B's shape (fewer layers where only bits matter), and passes over them."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.shapes import QWEN3_06B
from quipu.kernels.backend import BackendConfig
from quipu.kernels.batch import StepBatch
from quipu.kernels.triton.triton_backend import TritonBackend
from tests.gpu.machine import Machine

_REHEARSED = {
    "dtype": "float32", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
BLOCK_SIZE = 16
TABLES = 64
"""Number of sequences that the cache has blocks for."""


def shape_of(machine: Machine, **changes: Any) -> dict[str, Any]:
    return {**QWEN3_06B, **(_REHEARSED if machine.rehearsal else changes)}


def make_backend(
    machine: Machine, *, num_layers: int = 4, determinism: str = "fast", longest: int = 2048, max_loras: int = 0
) -> TritonBackend:
    """Load a backend with enough blocks for `TABLES` sequences of the longest length."""
    shape = shape_of(machine, num_hidden_layers=num_layers)
    longest, num_seqs, num_tokens = (48, 4, 48) if machine.rehearsal else (2048, TABLES, 4096)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        config = BackendConfig(
            model_path=Path(folder),
            dtype="auto",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_blocks=1 + num_seqs * longest // BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_model_len=longest,
            max_num_batched_tokens=num_tokens,
            determinism=determinism,
            max_loras=max_loras,
        )
        return TritonBackend(config, machine.device, machine.tiles)


def blocks_of(slot: int, longest: int, seed: int = 0) -> list[int]:
    """Return a slot's blocks, in shuffled order."""
    count = longest // BLOCK_SIZE
    blocks = list(range(1 + slot * count, 1 + (slot + 1) * count))
    random.Random(slot + seed).shuffle(blocks)
    return blocks


def make_batch(rows: list[tuple[int, int, list[int], list[int]]]) -> StepBatch:
    """Make a batch from rows of (slot, first position, token ids, blocks); all sample greedily."""
    count, start = len(rows), [0]
    for _, _, token_ids, _ in rows:
        start.append(start[-1] + len(token_ids))
    return StepBatch(
        slots=[slot for slot, _, _, _ in rows],
        query_start=start,
        positions=[position for _, position, _, _ in rows],
        token_ids=[token_id for _, _, token_ids, _ in rows for token_id in token_ids],
        block_tables=[blocks for _, _, _, blocks in rows],
        samples=[True] * count,
    )


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=length)


def one_row(backend: TritonBackend, length: int, num_compared: int, chunks: list[int]) -> torch.Tensor:
    """Return logits of the last positions of one text, computed alone, in chunks; every unwritten slot is NaN."""
    return several_rows(backend, length, num_compared, 0, chunks)


def several_rows(
    backend: TritonBackend, length: int, num_compared: int, others: int, chunks: list[int] | None = None
) -> torch.Tensor:
    """Do the same together with other rows, which prefill; the blocks differ with the number of rows."""
    backend.cache.fill(float("nan"))
    longest = backend.memory_plan.max_model_len
    token_ids, blocks = text(length, 1), blocks_of(0, longest, seed=others)
    results, position = [], 0
    for size in chunks or [length // 2, length - length // 2 - num_compared, *[1] * num_compared]:
        rows = [(i, 0, text(1 + 5 * i % 37, i), blocks_of(i, longest)) for i in range(1, others + 1)]
        place = position % (others + 1)
        rows.insert(place, (0, position, token_ids[position : position + size], blocks))
        batch = make_batch(rows)
        first = batch.query_start[place]
        wanted = [first + i for i in range(size) if position + i >= length - num_compared]
        results.append(backend.logits(batch, wanted))
        position += size
    return torch.cat(results)
