"""What the executor receives: one plan per step, and barriers.

From its `Admit` until it is released, the executor keeps a sequence's tokens, block table and progress. A plan contains
the changes since the last one and the sequences that run: some continue from their last token, the others compute a
chunk of their known tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quipu.kernels.step_types import SequenceKind

from .images import PromptImage
from .sampling import SamplingParams


class Admit(msgspec.Struct, frozen=True, gc=False):
    """A sequence that is new to the executor, or returns to it. A plan that admits it also gives it its blocks."""

    sequence_id: int
    sampling: SamplingParams
    tokens: list[int]
    """All known tokens: its prompt, and outputs of earlier admissions. Neither side changes this list."""
    num_outputs: int
    """How many of these, at the end, are outputs: the position of the next one."""
    max_len: int
    """Upper bound on prompt and output tokens together."""
    stop_ids: frozenset[int]
    """Tokens that end it. Tokens that a backend yields after one of them are discarded."""
    root_key: bytes
    keys: list[bytes]
    """Chain keys of the blocks granted as cached, in order, to be checked against the executor's tags."""
    copy_source: int = 0
    """As in `Granted`. The contents to copy are those before this pass."""
    kind: SequenceKind = SequenceKind.GENERATE
    adapter: str = ""
    """Digest of the adapter whose weights it is computed with. Empty: the model's own."""
    images: tuple[PromptImage, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. A plan whose generation has failed is answered by `StepDropped` and not run."""

    step: int
    generation: int
    released_ids: list[int]
    """Sequences that the executor may forget, even if the plan is dropped."""
    admitted: list[Admit]
    row_ids: list[int]
    """Sequences that run: first those that continue, then those that compute a chunk."""
    num_going_on: int
    """Number of rows that continue: each feeds its last sampled token, still on the device, and samples the next."""
    most_positions: int
    """Maximum number of positions that each of these rows may advance; the result has the actual number."""
    chunk_starts: list[int]
    """The first position of each of the other rows..."""
    chunk_counts: list[int]
    """...and how many positions it computes. A chunk that ends with the last known token samples the next one."""
    new_blocks: dict[int, list[int]]
    """Blocks to append to the tables of sequences, by id."""
    to_score: ToScore | None = None
    forgets_outputs: bool = False
    """Whether outputs of sequences that have ended must not be used for drafts any more."""
    fewer_positions: dict[int, int] = {}
    """Rows that continue and may advance by fewer positions than `most_positions`: by so many."""

    def most_positions_of(self, row: int) -> int:
        """Return the maximum number of positions that a row that continues may advance."""
        return self.fewer_positions.get(row, self.most_positions)


class Barrier(msgspec.Struct, frozen=True, gc=False):
    """Answer with `BarrierPassed` once every plan that was sent before is done.

    Sent by the mover. A plan may still write to blocks that its sequences have lost since it was sent; a load must
    write to these blocks later.
    """

    number: int


class DropAdapter(msgspec.Struct, frozen=True, gc=False):
    """Unload an adapter once every plan that was sent before is done."""

    digest: str
    dropped: Callable[[], object]
    """To be called, in the event loop, afterwards."""


ExecutorMessage = StepPlan | Barrier | DropAdapter


class ToScore(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a pass has to score, by row."""

    rows: list[int]
    positions: list[int]
    """Position of the first token that each row scores; the row computes the position before it."""
    token_ids: list[list[int]]
    """The prompt tokens from there on that the row scores."""
