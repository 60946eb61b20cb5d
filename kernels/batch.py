"""What one forward pass runs on, as plain columns.

The executor builds a `StepBatch` from its plan; a backend turns it into whatever its device wants. No torch here, so
that a backend without torch (the fake one) stays light.

What must always hold: rows are independent sequences; row i owns tokens `query_start[i]:query_start[i+1]`, at
consecutive positions from `positions[i]`; its KV for every position up to its last one is reachable through
`block_tables[i]`; no two rows write the same physical slot. Scores cost nothing where nobody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from .logit_processors import Processing


@attrs.frozen
class RowSampling:
    """How one sequence's tokens are drawn. The executor makes one when a sequence is admitted; its rows share it.

    Fields are named as in the request's sampling parameters, from which the executor copies them by name. Defaults are
    greedy, every filter off. A sampler that does not apply a field leaves rows that set it to `sampling/oracle.py`.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    seed: int = 0
    """64 bits, unsigned: Philox's key."""


def _for_every_row(value: object) -> Any:
    """Return the default of a column of `StepBatch`: `value` in each row."""
    return attrs.Factory(lambda batch: [value] * len(batch.slots), takes_self=True)


@attrs.frozen
class StepBatch:
    """One pass over R rows and N tokens."""

    slots: list[int]
    """R. A number that a sequence keeps for life (0 <= slot < max_num_seqs); state on the device is kept by it."""
    query_start: list[int]
    """R+1. Row i's tokens are `query_start[i]:query_start[i+1]` of the flat columns."""
    positions: list[int]
    """R. Position of each row's first token."""
    token_ids: list[int]
    """N. Ids to feed. A carried row has one token, and what stands here for it is ignored."""
    block_tables: list[list[int]]
    """R. Physical block of each logical block, covering every position up to the row's last one."""
    samples: list[bool]
    """R. Whether the row's last position draws a token."""
    sampling: list[RowSampling] = attrs.field(default=_for_every_row(RowSampling()))
    """R. How each row draws; read only where `samples`."""
    output_position: list[int] = attrs.field(default=_for_every_row(0))
    """R. How many outputs the sequence has drawn before this one: Philox's counter."""
    carried: list[bool] = attrs.field(default=_for_every_row(False))
    """R. True: feed the token that this slot drew in the pass before (it need not have reached the host)."""
    scoring: Scoring | None = None
    """What to say of tokens besides drawing them; None, as nearly always: nothing."""
    processing: Processing | None = None
    """What changes logits before tokens are drawn from them; None: nothing. Scores are of the raw ones."""
    copies: Sequence[tuple[int, int]] = ()
    """Physical blocks to copy, from the first of each pair to the second, before anything is read or written. All are
    read before any is written: what one pair copies over may be what another one copies."""


@attrs.frozen
class Scoring:
    """Tokens of a pass whose logprobs are wanted."""

    drawn_rows: list[int]
    """Rows with `samples`, ascending: the token that each draws is scored."""
    drawn_num_top: list[int]
    """How many of the likeliest tokens are told beside each."""
    prompt_tokens: list[int]
    """Flat indexes, ascending: the logits of each score the token that follows it in its prompt..."""
    prompt_target_ids: list[int]
    """...which is this one."""
    prompt_num_top: list[int]


@attrs.frozen
class Scores:
    """What a model gave some tokens, as parallel columns.

    A logprob is log-softmax of the raw logits in float32, before temperature and filters. The order of tokens is that
    of their logits; of equals the lower id comes first.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """1 is the likeliest."""
    top_ids: list[list[int]]
    """The likeliest tokens, as many as were asked for; the scored one is among them or not."""
    top_logprobs: list[list[float]]

    @classmethod
    def empty(cls) -> Scores:
        return cls([], [], [], [], [])

    def extend(self, others: Scores) -> None:
        """Put `others` behind these."""
        self.token_ids.extend(others.token_ids)
        self.logprobs.extend(others.logprobs)
        self.ranks.extend(others.ranks)
        self.top_ids.extend(others.top_ids)
        self.top_logprobs.extend(others.top_logprobs)

    def cut(self, start: int, end: int) -> Scores:
        """Those from `start` to `end`."""
        part = slice(start, end)
        return Scores(
            self.token_ids[part], self.logprobs[part], self.ranks[part], self.top_ids[part], self.top_logprobs[part]
        )


@attrs.frozen
class Drawn:
    """Tokens drawn by one pass."""

    rows: list[int]
    """Indexes of the rows that drew, ascending: those with `samples`."""
    token_ids: list[int]
    """One for each."""
    scores: Scores | None = None
    """Of the tokens drawn by `Scoring.drawn_rows`. None where the batch has no scoring."""
    prompt_scores: Scores | None = None
    """Of `Scoring.prompt_target_ids`."""
