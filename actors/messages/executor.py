"""What the executor receives: one plan per step, and barriers.

A sequence stands with the executor from its `Admit` until it is released: its tokens, its block table and how far it is
are the executor's to know. A plan says what changes, and which sequences run: some go on from where they stand, the
others compute a chunk of their known tokens.
"""

from __future__ import annotations

import msgspec

from quipu.kernels.step_types import SequenceKind

from .sampling import SamplingParams


class Admit(msgspec.Struct, frozen=True, gc=False):
    """A sequence that is new to the executor, or returns to it. A plan that admits it also gives it its blocks."""

    sequence_id: int
    sampling: SamplingParams
    tokens: list[int]
    """All tokens that are known: its prompt, and outputs of earlier admissions. Neither side changes this list."""
    num_outputs: int
    """How many of these, at the end, are outputs: the position of the next one."""
    max_len: int
    """Upper bound on prompt and output tokens together: it never goes on beyond."""
    stop_ids: frozenset[int]
    """Tokens that end it. What a backend yields after one is not kept."""
    root_key: bytes
    keys: list[bytes]
    """Chain keys of the blocks granted as cached, in order, to be checked against the executor's tags."""
    copy_source: int = 0
    """As in `Granted`. The contents to copy are those before this pass."""
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    """Digest of the adapter whose weights it is computed with. Empty: the model's own."""


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. A plan whose generation has failed is answered by `StepDropped` and not run."""

    step: int
    generation: int
    released_ids: list[int]
    """Sequences that the executor may forget, even if the plan is dropped."""
    admitted: list[Admit]
    row_ids: list[int]
    """Sequences that run: first those that go on, then those that compute a chunk."""
    num_going_on: int
    """Rows that feed the token that they drew last, which is still on the device, and draw the next."""
    most_positions: int
    """The most positions that each of these may advance. The result says how many it did."""
    chunk_starts: list[int]
    """Of the other rows: the first position of each..."""
    chunk_counts: list[int]
    """...and how many it computes. The chunk that ends with the last known token draws the next."""
    new_blocks: dict[int, list[int]]
    """Blocks to append to the tables of sequences, by id."""
    to_score: ToScore | None = None


class Barrier(msgspec.Struct, frozen=True, gc=False):
    """Answer with `BarrierPassed` once every plan that was sent before is done.

    Comes from the mover. A plan may still write to blocks that its sequences have lost since it was sent; what a load
    writes there must come after.
    """

    number: int


ExecutorMessage = StepPlan | Barrier


class ToScore(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a pass has to score, by row."""

    rows: list[int]
    positions: list[int]
    """Position of the first token that each row scores; the row computes the position before it."""
    token_ids: list[list[int]]
    """The prompt tokens from there on that the row scores."""
