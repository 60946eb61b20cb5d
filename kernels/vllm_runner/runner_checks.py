"""Compares what vLLM's runner is about to compute, or has computed, with the batch: the part that the host can see.

`logit_sampler.py` (runner V1) and `device_sampler.py` (V2, which compares the rest on the device) call it in each pass,
before they draw.

What must always hold: a difference raises `RunnerDiverged`, which ends the engine; nothing is changed. The rows may be
in any order, which is returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
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
    table = input_batch.block_table[0]
    positions, lengths, lasts = (
        [column[row] for row in order] for column in (step.positions, step.num_blocks, step.last_blocks)
    )
    _compare("positions", input_batch.num_computed_tokens_cpu[: len(order)], positions)
    _compare("lengths of block tables", table.num_blocks_per_row[: len(order)], lengths)
    _compare("last blocks", table.block_table.np[range(len(order)), [length - 1 for length in lengths]], lasts)
    fed = [token_id for row in order for token_id in step.inputs[row] or ()]
    _compare("input tokens", input_ids[: len(fed)], fed)
    for new in step.announced:
        theirs = table.block_table.np[names.index(new.request_id), : len(new.table)]
        _compare(f"blocks of request {new.request_id}", theirs, new.table)
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
        _compare(what, theirs, [ours[row] for row in order])
    return order


def _compare(what: str, theirs: npt.NDArray[np.int32] | torch.Tensor, ours: list[int]) -> None:
    """Raises RunnerDiverged unless the runner's numbers are ours."""
    # as lists: most are short, and numpy would make arrays of ours, and of the differences
    if (found := theirs.tolist()) != ours:
        raise RunnerDiverged(f"vLLM's runner has other {what} than the batch: {found} instead of {ours}")
