"""A `StepBatch` as index tensors for the reference's operations. Made once a pass, read by every layer.

What must always hold: token rows are padded to whole tiles; padding rows are never written to the cache, never
attend, and draw nothing.
"""

from __future__ import annotations

import attrs
import torch

from ..batch import StepBatch
from .rows import ROWS, round_up


@attrs.frozen
class Span:
    """One row of the batch: `length` tokens from flat index `start`, at positions from `position`."""

    start: int
    length: int
    position: int
    blocks: torch.Tensor
    """Physical block of each logical block, int64."""


@attrs.frozen
class StepPlan:
    """One pass. N includes padding, n does not."""

    spans: list[Span]
    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    blocks_n: torch.Tensor
    """Physical block to which each token's KV is written."""
    offsets_n: torch.Tensor
    """Slot within that block."""


def make_plan(batch: StepBatch, last_drawn: list[int | None], block_size: int) -> StepPlan:
    """Lay out a batch. Raises ValueError as `StepBatch.inputs`."""
    num_tokens = len(batch.token_ids)
    token_ids_N = torch.zeros(round_up(num_tokens, ROWS), dtype=torch.int64)
    token_ids_N[:num_tokens] = torch.tensor(batch.inputs(last_drawn), dtype=torch.int64)
    positions_N = torch.zeros_like(token_ids_N)
    blocks_n = torch.empty(num_tokens, dtype=torch.int64)
    spans = []
    for row, position in enumerate(batch.positions):
        start, end = batch.query_start[row], batch.query_start[row + 1]
        positions_n = torch.arange(position, position + end - start)
        blocks = torch.tensor(batch.block_tables[row], dtype=torch.int64)
        positions_N[start:end] = positions_n
        blocks_n[start:end] = blocks[positions_n // block_size]
        spans.append(Span(start=start, length=end - start, position=position, blocks=blocks))
    return StepPlan(
        spans=spans,
        token_ids_N=token_ids_N,
        positions_N=positions_N,
        blocks_n=blocks_n,
        offsets_n=positions_N[:num_tokens] % block_size,
    )
