"""What the executor receives: one plan a step."""

from __future__ import annotations

import msgspec

from .sampling import SamplingParams


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. A plan whose generation has failed is answered by `StepDropped` and not run."""

    step: int
    generation: int
    released_ids: list[int]
    """Sequences the executor may forget, applied even when the plan is dropped."""
    admitted_ids: list[int]
    admitted_sampling: list[SamplingParams]
    admitted_root_keys: list[bytes]
    admitted_keys: list[list[bytes]]
    """Chain keys of the blocks that were granted as cached, in order, to be checked against the executor's tags."""
    admitted_tokens: list[list[int]]
    """Token ids in those blocks; the executor continues the chain from them."""
    admitted_num_outputs: list[int]
    """Outputs drawn before this admission (after a preemption): the next draw's position."""
    row_ids: list[int]
    row_epochs: list[int]
    row_starts: list[int]
    row_counts: list[int]
    row_new_blocks: list[list[int]]
    row_token_ids: list[list[int]]
    """Ids to feed; empty where the row feeds the token that the step before it draws (still on the device)."""
    row_samples: list[bool]
    """Whether the row's last position draws a token."""
    admitted_copy_sources: list[int] = []
    """Parallel to `admitted_ids`, as in `Granted`. Contents are those of the time before this pass."""
    to_score: ToScore | None = None
    masks: TokenMasks | None = None


class TokenMasks(msgspec.Struct, frozen=True, gc=False):
    """What a grammar allows in this step, by row: the executor applies it, nobody here makes it yet.

    Whoever does must know all of a row's tokens: such a row cannot be planned before the step before it is done.
    """

    rows: list[int]
    """Ascending; each draws a token in this step."""
    words: list[bytes]
    """Of each: ceil(vocabulary / 32) words of 32 bits, little-endian. A token whose bit (lowest first) is 0 is not
    drawn; one bit at least is 1, or the step fails."""


class ToScore(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a pass has to score, by row."""

    rows: list[int]
    positions: list[int]
    """Of the first token that each row scores: the position before it is among those the row computes."""
    token_ids: list[list[int]]
    """The prompt's tokens from there on, as far as this row scores them."""
