"""Steps for a backend: rows with blocks and tokens."""

from __future__ import annotations

import random
from typing import Any

import attrs

from quipu.kernels.batch import StepBatch
from quipu.kernels.step_types import RowSampling
from tests.kernels.family_configs import VOCAB_SIZE

_SAMPLING = attrs.fields_dict(RowSampling).keys()


def scattered_blocks(count: int, seed: int, *, num_blocks: int = 160) -> list[int]:
    """Return distinct physical blocks in random order, never block 0, the null block."""
    return random.Random(seed).sample(range(1, num_blocks), count)


def make_batch(*rows: dict[str, Any]) -> StepBatch:
    """Make a batch from rows of `token_ids`, `position` and `blocks`; everything else has defaults."""
    start = [0]
    for row in rows:
        start.append(start[-1] + len(row["token_ids"]))
    return StepBatch(
        slots=[row.get("slot", index) for index, row in enumerate(rows)],
        query_start=start,
        positions=[row["position"] for row in rows],
        token_ids=[token_id for row in rows for token_id in row["token_ids"]],
        carried=[row.get("carried", False) for row in rows],
        block_tables=[row["blocks"] for row in rows],
        samples=[row.get("samples", True) for row in rows],
        sampling=[RowSampling(**{name: row[name] for name in _SAMPLING & row.keys()}) for row in rows],
        output_position=[row.get("output_position", 0) for row in rows],
    )


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)
