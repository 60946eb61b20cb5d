"""What the executor receives: one plan per step."""

from __future__ import annotations

import msgspec

from .sampling import SamplingParams


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. A plan whose generation has failed is answered by `StepDropped` and not run."""

    step: int
    generation: int
    released_ids: list[int]
    """Sequences that the executor may forget, even if the plan is dropped."""
    admitted_ids: list[int]
    admitted_sampling: list[SamplingParams]
    admitted_root_keys: list[bytes]
    admitted_keys: list[list[bytes]]
    """Chain keys of the blocks granted as cached, in order, to be checked against the executor's tags."""
    admitted_tokens: list[list[int]]
    """Token ids in those blocks, from which the executor continues the chain."""
    admitted_num_outputs: list[int]
    """Outputs sampled before this admission, if the sequence was preempted: the position of the next one."""
    row_ids: list[int]
    row_epochs: list[int]
    row_starts: list[int]
    row_counts: list[int]
    row_new_blocks: list[list[int]]
    row_token_ids: list[list[int]]
    """Token ids to feed; empty if the row feeds the token sampled by the step before it, still on the device."""
    row_samples: list[bool]
    """Whether a token is sampled at the row's last position."""
    admitted_copy_sources: list[int] = []
    """Parallel to `admitted_ids`, as in `Granted`. The contents to copy are those before this pass."""
    to_score: ToScore | None = None


class ToScore(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a pass has to score, by row."""

    rows: list[int]
    positions: list[int]
    """Position of the first token that each row scores; the row computes the position before it."""
    token_ids: list[list[int]]
    """The prompt tokens from there on that the row scores."""
