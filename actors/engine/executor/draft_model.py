"""Guesses tokens with a second, smaller model, the draft model.

Called by `model_drafts.py` before a step's pass. The draft model reads the same sequences, and has a KV cache of its
own with as many blocks as the model's, reached through the same block tables. It computes what it lacks of a sequence
when it guesses for it, and nothing of sequences for which it never does:

    model        t0 .. t7 are computed; its next pass feeds t8
    draft model  t0 .. t5 are computed; feeds t6 t7 t8 and draws d1, feeds d1 and draws d2, ...

It draws with the sequence's own parameters and Philox numbers, and under its rules, as the model will: the nearer its
logits are, the more often it draws the same token, seeded or greedy.

What must always hold: a tag of its record of blocks says what the draft model has computed there, whatever the model's
cache holds; what it wrote for guessed tokens has no tag until they are known to be right. A wrong tag, or wrong KV,
could make guesses worse, and never change a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quipu.kernels.backend import Backend
from quipu.kernels.batch import StepBatch
from quipu.kernels.logit_processors import LogitProcessor, Processing

from .block_tags import BlockTags
from .draft_depth import PassCosts
from .sequence_state import SequenceState

MAX_PAID_BACK = 64
"""Tokens over which the computation of a text that the draft model has not seen is expected to pay, if the sequence may
have as many."""


@attrs.frozen
class Wanted:
    """How many tokens to guess of a sequence. Its blocks must have room for all of them but the last."""

    sequence_id: int
    state: SequenceState
    num_tokens: int


@attrs.define(eq=False)
class _Sequence:
    """What the draft model has computed of a sequence."""

    num_computed: int
    """Of its tokens, from the first."""
    num_tagged: int
    """Full blocks that have their tags, likewise."""
    guessed: list[int] = attrs.field(factory=list)
    """Tokens computed behind those, which were guesses then."""


@attrs.frozen(eq=False)
class _Row:
    """What one pass computes of one sequence."""

    state: SequenceState
    start: int
    token_ids: Sequence[int]
    guesses: list[int]
    """Those drawn so far; the pass adds one, if it reaches the end of the text."""
    draws: bool


class DraftModel:
    """A backend of its own, and what its blocks hold."""

    def __init__(self, backend: Backend, costs: PassCosts, *, max_num_tokens: int) -> None:
        """`max_num_tokens`: the most of a pass."""
        plan = backend.memory_plan
        self.backend = backend
        self.costs = costs
        self.max_num_tokens = max_num_tokens
        self._block_size = plan.block_size
        self._tags = BlockTags(plan.num_blocks, plan.block_size)
        self._sequences: dict[int, _Sequence] = {}

    def num_lacking(self, sequence_id: int, state: SequenceState) -> int:
        """Return how many tokens of a text it has not computed, apart from the last one, which no one has."""
        return len(state.tokens) - self._find(sequence_id, state).num_computed - 1

    def catch_up_cost(self, sequence_id: int, state: SequenceState) -> float:
        """Return what it costs to compute what is lacking of a text, shared among the tokens for which it may pay."""
        num_lacking = self.num_lacking(sequence_id, state)
        if not num_lacking:
            return 0.0
        cost = self.costs.of_pass(1 + num_lacking) - self.costs.of_pass(1)
        return cost / min(num_lacking, MAX_PAID_BACK, max(1, state.max_len - len(state.tokens)))

    def guess(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return guessed tokens for each sequence: none if there is more of its text to compute than a pass may have,
        fewer than wanted if the logits are broken."""
        guesses: list[list[int]] = [[] for _ in wanted]
        written: list[int] = []
        try:
            self._run(self._rows_of_texts(wanted, guesses, written))
            for num in range(1, max((one.num_tokens for one in wanted), default=0)):
                going_on = [
                    (one, drawn)
                    for one, drawn in zip(wanted, guesses, strict=True)
                    if len(drawn) == num < one.num_tokens
                ]
                if not going_on:
                    break
                self._run(
                    [
                        _Row(one.state, len(one.state.tokens) + num - 1, drawn[-1:], drawn, draws=True)
                        for one, drawn in going_on
                    ]
                )
                for one, drawn in going_on:
                    self._sequences[one.sequence_id].guessed.append(drawn[num - 1])
        except BaseException:
            self._tags.forget(written)
            for one in wanted:
                self.release(one.sequence_id)
            raise
        return guesses

    def release(self, sequence_id: int) -> None:
        """Forget a sequence. Its blocks keep their tags."""
        self._sequences.pop(sequence_id, None)

    def _find(self, sequence_id: int, state: SequenceState) -> _Sequence:
        """Return how far a sequence is computed, guesses that were right included, and tag its full blocks."""
        known, most = self._sequences.get(sequence_id), len(state.tokens) - 1
        if known is None:
            known = self._sequences[sequence_id] = _Sequence(0, 0)
        for right in known.guessed:
            if known.num_computed >= most or state.tokens[known.num_computed] != right:
                break
            known.num_computed += 1
        known.guessed.clear()
        if most - known.num_computed >= self._block_size:  # a block of which another sequence may have computed all
            confirmed = self._tags.num_confirmed_tokens(state.table, state.keys[1:])
            known.num_computed = max(known.num_computed, confirmed)
            known.num_tagged = max(known.num_tagged, confirmed // self._block_size)
        known.num_computed = min(known.num_computed, most)
        self._tag(known, state)
        return known

    def _tag(self, known: _Sequence, state: SequenceState) -> None:
        """Tag the full blocks that are computed and whose keys are known: the last one's may follow later."""
        end = min(known.num_computed // self._block_size, len(state.keys) - 1)
        if end > known.num_tagged:
            blocks = slice(known.num_tagged, end)
            self._tags.set_loaded(state.table[blocks], state.keys[1:][blocks])
            known.num_tagged = end

    def _rows_of_texts(self, wanted: Sequence[Wanted], guesses: Sequence[list[int]], written: list[int]) -> list[_Row]:
        """Return the rows of the pass that computes what is lacking, and note them as computed.

        Tags of blocks that will be written are removed, and `written` names them. What one row computes, later ones
        need not, if they share its blocks: they read it in the same pass.
        """
        rows: list[_Row] = []
        room, size = self.max_num_tokens, self._block_size
        for one, drawn in zip(wanted, guesses, strict=True):
            state, known = one.state, self._find(one.sequence_id, one.state)
            start, num_tokens = known.num_computed, len(state.tokens)
            end = min(num_tokens, start + room)
            if end == start:
                break
            room -= end - start
            last = end if end < num_tokens else end + one.num_tokens - 1
            blocks = state.table[start // size : -(-last // size)]
            self._tags.forget(blocks)
            written += blocks
            rows.append(_Row(state, start, state.tokens[start:end], drawn, draws=end == num_tokens))
            known.num_computed = end
            self._tag(known, state)
        return rows

    def _run(self, rows: Sequence[_Row]) -> None:
        """Run a pass, and add what it draws to the guesses of its rows."""
        query_start = [0]
        for row in rows:
            query_start.append(query_start[-1] + len(row.token_ids))
        processors: list[tuple[int, LogitProcessor]] = []
        for at, row in enumerate(rows):
            if row.draws and (processor := row.state.logit_processor()) is not None:
                processors.append((at, processor.after(row.guesses)))
        drawn = self.backend.step(
            StepBatch(
                slots=[row.state.slot for row in rows],
                query_start=query_start,
                positions=[row.start for row in rows],
                token_ids=[token_id for row in rows for token_id in row.token_ids],
                block_tables=[row.state.table for row in rows],
                samples=[row.draws for row in rows],
                sampling=[row.state.row_sampling for row in rows],
                output_position=[row.state.num_outputs + len(row.guesses) for row in rows],
                processing=Processing([at for at, _ in processors], [one for _, one in processors])
                if processors
                else None,
            )
        )
        for at, token_id in zip(drawn.rows, drawn.token_ids, strict=True):
            if at not in drawn.broken_rows:
                rows[at].guesses.append(token_id)
