"""Compares what vLLM's runner is about to compute, or has computed, with the batch: the part that the host can see.

`logit_sampler.py` (runner V1) and `device_sampler.py` (V2, which compares the rest on the device) call it in each pass,
before they draw.

What must always hold: a difference raises `RunnerDiverged`, which ends the engine; nothing is changed. The rows may be
in any order, which is returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..step_errors import RunnerDiverged
from .runner_requests import RunnerStep


def check_batch(input_batch: Any, input_ids: torch.Tensor, step: RunnerStep) -> list[int]:
    """Return the rows of the step in the runner's order.

    Raises RunnerDiverged unless the runner has computed exactly these rows: at these positions, from these tokens,
    through tables of this length that end with this block, and the tables of new requests entry by entry.
    """
    names = list(input_batch.req_ids)
    order = step.rows_in_order(names)
    count = len(order)
    table = input_batch.block_table[0]
    ours = np.array([step.positions, step.num_blocks, step.last_blocks], np.int64)[:, order]
    columns = {
        "positions": (input_batch.num_computed_tokens_cpu[:count], ours[0]),
        "lengths of block tables": (table.num_blocks_per_row[:count], ours[1]),
        "last blocks": (table.block_table.np[np.arange(count), ours[1] - 1], ours[2]),
    }
    fed = [token_id for row in order for token_id in step.inputs[row] or ()]
    columns["input tokens"] = (input_ids[: len(fed)].numpy(), fed)
    for new in step.announced:
        place = names.index(new.request_id)
        columns[f"blocks of request {new.request_id}"] = (table.block_table.np[place, : len(new.table)], new.table)
    _compare(columns)
    return order


def check_known_to_host(input_batch: Any, num_blocks: Any, step: RunnerStep) -> list[int]:
    """Return the rows of the step in the order of runner V2. `num_blocks`: lengths of its tables.

    Raises RunnerDiverged unless the runner has been told of exactly these rows, with so many tokens, at these positions
    and through tables of this length.
    """
    order = step.rows_in_order(input_batch.req_ids)
    columns = {
        "numbers of tokens": (input_batch.num_scheduled_tokens, step.counts),
        "positions": (input_batch.num_computed_tokens_np, step.positions),
        "lengths of block tables": (num_blocks[input_batch.idx_mapping_np], step.num_blocks),
    }
    for what, (theirs, ours) in columns.items():
        expected = [ours[row] for row in order]
        if not np.array_equal(theirs, expected):
            raise RunnerDiverged(f"vLLM's runner has other {what} than the batch: {list(theirs)} instead of {expected}")
    return order


def _compare(columns: dict[str, tuple[Any, Any]]) -> None:
    """Raises RunnerDiverged unless the runner's numbers are ours. `columns`: theirs and ours, by what they are."""
    for what, (theirs, ours) in columns.items():
        if not np.array_equal(theirs, ours):
            raise RunnerDiverged(
                f"vLLM's runner has other {what} than the batch: {list(theirs)} instead of {list(ours)}"
            )
