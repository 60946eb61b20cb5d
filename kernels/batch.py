"""The input and the results of one forward pass, as plain columns.

The executor builds a `StepBatch` from its plan; a backend converts it to what its device needs. No torch here, so that
the fake backend runs without it.

What must always hold: row i has tokens `query_start[i]:query_start[i+1]`, at consecutive positions from `positions[i]`;
its KV for every position up to its last one is reachable through `block_tables[i]`; no two rows write the same physical
slot. Rows are independent sequences, except that where the backend verifies drafts (`draft_rows.py`), a row may follow
another in the same block table, and reads what that one writes. Scores cost nothing if none are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from .step_types import PromptImage, RowSampling, Scores

if TYPE_CHECKING:
    from .logit_processors import Processing


def _for_every_row(value: object) -> Any:
    """Return the default of a column of `StepBatch`: `value` in each row."""
    return attrs.Factory(lambda batch: [value] * len(batch.slots), takes_self=True)


@attrs.frozen
class StepBatch:
    """One pass over R rows and N tokens."""

    slots: list[int]
    """R. A number that a sequence keeps while it runs (0 <= slot < max_num_seqs); keys its state on the device."""
    query_start: list[int]
    """R+1. Row i has tokens `query_start[i]:query_start[i+1]` of the flat columns."""
    positions: list[int]
    """R. Position of each row's first token."""
    token_ids: list[int]
    """N. Input ids. A carried row has one token, whose entry here is ignored."""
    block_tables: list[list[int]]
    """R. Physical block of each logical block, for every position up to the row's last one."""
    samples: list[bool]
    """R. Whether the row's last position draws a token."""
    sampling: list[RowSampling] = attrs.field(default=_for_every_row(RowSampling()))
    """R. How each row draws; read only where `samples`."""
    output_position: list[int] = attrs.field(default=_for_every_row(0))
    """R. How many outputs the sequence has drawn before: Philox's counter."""
    carried: list[bool] = attrs.field(default=_for_every_row(False))
    """R. Whether the input is the token that this slot drew in the previous pass (the host may not know it yet)."""
    scoring: Scoring | None = None
    """Tokens whose logprobs are requested; None, as almost always: none."""
    processing: Processing | None = None
    """Changes to logits before tokens are drawn; None: none. Scores are of the raw logits."""
    pooling: Pooling | None = None
    """Outputs of the model that are requested as vectors; None: none."""
    adapters: list[str] | None = None
    """R. Digest of the adapter whose weights are added for each row; empty for none. None: no row has one."""
    copies: Sequence[tuple[int, int]] = ()
    """Physical blocks to copy before the pass, from the first of each pair to the second. All are read before any is
    written: one pair may overwrite the source of another."""
    images: Sequence[ImageTokens] = ()
    """Tokens that stand for images. Only for backends that read images."""

    def inputs(self, last_drawn: Sequence[int | None]) -> list[int]:
        """Return the input ids, those of carried rows too. `last_drawn`: the last token of each slot.

        Raises ValueError for a carried row without a drawn token, or with several tokens.
        """
        token_ids = list(self.token_ids)
        for row, carried in enumerate(self.carried):
            if carried:
                start, drawn = self.query_start[row], last_drawn[self.slots[row]]
                if drawn is None or self.query_start[row + 1] - start != 1:
                    raise ValueError(f"row {row} carries slot {self.slots[row]}, which has no single token to carry")
                token_ids[start] = drawn
        return token_ids


@attrs.frozen(eq=False)
class ImageTokens:
    """The tokens of a pass that stand for one image, or for a part of it."""

    image: PromptImage
    first: int
    """Which of the image's placeholders the first one is."""
    row: int
    offset: int
    """Index of the first one among the row's tokens."""
    count: int


@attrs.frozen
class Scoring:
    """Tokens of a pass whose logprobs are requested."""

    drawn_rows: list[int]
    """Rows with `samples`, ascending, whose drawn tokens are scored."""
    drawn_num_top: list[int]
    """How many of the most likely tokens to report with each."""
    prompt_tokens: list[int]
    """Flat indexes, ascending: the logits there score the next token of the prompt..."""
    prompt_target_ids: list[int]
    """...which has this id."""
    prompt_num_top: list[int]

    def without(self, rows: Sequence[int]) -> Scoring:
        """Return this without the tokens that these rows draw."""
        if not rows:
            return self
        kept = [at for at, row in enumerate(self.drawn_rows) if row not in rows]
        return attrs.evolve(
            self,
            drawn_rows=[self.drawn_rows[at] for at in kept],
            drawn_num_top=[self.drawn_num_top[at] for at in kept],
        )


@attrs.frozen
class Pooling:
    """Tokens of a pass whose outputs are requested: final hidden states, or logits of a model that is not headless.

    Each row's are summed in float64, exactly (`pooling.py`).
    """

    rows: list[int]
    """Ascending."""
    starts: list[int]
    """Flat index of the first token of each row that is pooled; so are all after it, up to the row's end."""
    columns: tuple[int, ...] = ()
    """The elements of an output that are wanted. Empty: all."""


@attrs.frozen
class Drawn:
    """The results of one pass."""

    rows: list[int]
    """Indexes of the rows with `samples`, ascending."""
    token_ids: list[int]
    """The drawn token of each; where a row yields several, the first."""
    more: dict[int, list[int]] = attrs.field(factory=dict)
    """Tokens that rows yielded after their first, by row, because drafts were accepted (`draft_rows.py`, which alone
    fills it in); their KV is written, except that of a row's last token."""
    scores: Scores | None = None
    """Of all tokens that `Scoring.drawn_rows` yielded, without `broken_rows`. None if the batch has no scoring."""
    prompt_scores: Scores | None = None
    """Of `Scoring.prompt_target_ids`."""
    pooled: list[bytes] = attrs.field(factory=list)
    """Of each of `Pooling.rows`, the sum of its outputs, in float64. NaN or infinite if one of them is."""
    broken_rows: list[int] = attrs.field(factory=list)
    """Those of `rows` for which the model's own logits hold NaN or +inf, or nothing but -inf. What is drawn for them
    means nothing."""

    @classmethod
    def of(cls, batch: StepBatch, rows: list[int], token_ids: list[int | None]) -> Drawn:
        """Make the result of a pass. None: nothing can be drawn from the row's logits."""
        if None not in token_ids:
            return cls(rows, cast(list[int], token_ids))
        failures = {} if batch.processing is None else batch.processing.failures
        broken = [
            row for row, token_id in zip(rows, token_ids, strict=True) if token_id is None and row not in failures
        ]
        return cls(rows, [token_id or 0 for token_id in token_ids], broken_rows=broken)
