"""Proposes the draft tokens of a step, and learns which were accepted.

Called by `step_runner.py`. Drafts come from a sequence's own tokens, from what its client predicts, and, with `suffix`,
from recent outputs of the same tenant (`recent_outputs.py`). How many are verified: `draft_depth.py`.

What must always hold: no step verifies more than `max_tokens` draft tokens; the work is bounded by `MAX_SEARCHED`; a
draft changes when tokens are computed, never which.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Protocol

import attrs

from .draft_depth import FREE, Acceptance, PassCosts, choose_depths
from .draft_lookup import MAX_MATCH, Draft, GrowingTokens, Tokens, follow, longest_match, vote
from .recent_outputs import RecentOutputs
from .sequence_state import SequenceState
from .step_rows import StepRows

MIN_MATCH = 2
"""The fewest tokens that have to match."""
MAX_SEARCHED = 1 << 20
"""Tokens that are searched in a step, a fraction of a millisecond each 100,000; the other rows have no draft in it."""


@attrs.define(eq=False)
class SequenceDrafts:
    """What the drafter knows of one sequence."""

    tokens: GrowingTokens
    prediction: Tokens
    acceptance: Acceptance = attrs.field(factory=Acceptance)
    pending: Draft | None = None
    """The draft that is being verified."""


class Drafts(Protocol):
    """What the executor needs of a drafter."""

    @property
    def max_depth(self) -> int:
        """The most draft tokens of a row."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The most of a step; None: as many as its rows may have."""
        ...

    def propose(self, rows: StepRows, num_tokens: int) -> dict[int, Draft]:
        """Return drafts of rows that continue; none is empty. `num_tokens` are in the pass anyway."""
        ...

    def note_accepted(self, sequence_id: int, num_accepted: int) -> None:
        """Record how many tokens of a sequence's draft were accepted."""
        ...

    def release(self, sequence_id: int, state: SequenceState) -> None:
        """Forget a sequence, but for its outputs."""
        ...

    def forget_outputs(self) -> None:
        """Forget the outputs of sequences that have ended."""
        ...


class Drafter:
    """Drafts for all sequences of an executor."""

    def __init__(self, *, max_depth: int, max_tokens: int, shares_outputs: bool, costs: PassCosts = FREE) -> None:
        """`shares_outputs`: whether recent outputs of the same tenant are searched, too."""
        self.max_depth = max_depth
        self.max_tokens = max_tokens
        self.costs = costs
        self.recent = RecentOutputs() if shares_outputs else None
        self._by_sequence: dict[int, SequenceDrafts] = {}
        self._first_row = 0

    def propose(self, rows: StepRows, num_tokens: int) -> dict[int, Draft]:
        """Return drafts of rows that continue; none is empty. `num_tokens` are in the pass anyway."""
        found: list[tuple[int, SequenceDrafts, Draft]] = []
        num_searched, num_rows = 0, rows.num_going_on
        for index in range(num_rows):
            row = (self._first_row + index) % num_rows
            state, most = rows.states[row], rows.ends[row] - rows.starts[row] - 1
            if most <= 0:
                continue
            drafts = self._drafts_of(rows.ids[row], state)
            recent = None if self.recent is None else self.recent.of(state.keys[0])
            num_searched += len(drafts.tokens) + len(drafts.prediction) + (0 if recent is None else len(recent))
            if num_searched > MAX_SEARCHED and index:
                self._first_row = row
                break
            draft = self._find(drafts, recent, state, min(most, self.max_depth))
            if draft is not None:
                found.append((row, drafts, draft))
        if not found:
            return {}
        chances = [_chances(drafts, draft) for _, drafts, draft in found]
        depths = choose_depths(chances, self.max_tokens, num_tokens, sum(rows.samples), self.costs)
        chosen: dict[int, Draft] = {}
        for (row, drafts, draft), depth in zip(found, depths, strict=True):
            if not depth:
                drafts.acceptance.note_untried(draft.num_matched)
                continue
            drafts.pending = chosen[row] = attrs.evolve(draft, token_ids=draft.token_ids[:depth])
        return chosen

    def note_accepted(self, sequence_id: int, num_accepted: int) -> None:
        """Record how many tokens of a sequence's draft were accepted."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is not None and (draft := drafts.pending) is not None:
            drafts.acceptance.note(draft.num_matched, len(draft.token_ids), num_accepted)
            drafts.pending = None

    def release(self, sequence_id: int, state: SequenceState) -> None:
        """Forget a sequence, but for its outputs."""
        self._by_sequence.pop(sequence_id, None)
        if self.recent is not None:
            self.recent.add(state.keys[0], state.tokens, state.num_outputs)

    def forget_outputs(self) -> None:
        """Forget the outputs of sequences that have ended."""
        if self.recent is not None:
            self.recent.clear()

    def _drafts_of(self, sequence_id: int, state: SequenceState) -> SequenceDrafts:
        """Return what is known of a sequence, with all its tokens."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is None:
            tokens = GrowingTokens(state.tokens)
            drafts = self._by_sequence[sequence_id] = SequenceDrafts(
                tokens, GrowingTokens(state.sampling.prediction).ids
            )
        elif len(drafts.tokens) < len(state.tokens):
            drafts.tokens.extend(state.tokens[len(drafts.tokens) :])
        elif len(drafts.tokens) > len(state.tokens):
            drafts.tokens.cut(len(state.tokens))  # a pass was taken back
        return drafts

    def _find(self, drafts: SequenceDrafts, recent: Tokens | None, state: SequenceState, most: int) -> Draft | None:
        """Return the draft with the longest match; of equal ones, the first source's."""
        own = drafts.tokens.ids
        end = own[-MAX_MATCH:]
        best: Draft | None = None
        if len(drafts.prediction):
            outputs = end[len(end) - min(len(end), state.num_outputs) :]
            if not len(outputs):
                token_ids = drafts.prediction[:most].tolist()
                return Draft(token_ids, [1.0] * len(token_ids), MAX_MATCH, is_predicted=True)
            match = longest_match(drafts.prediction, outputs, min(MIN_MATCH, len(outputs)))
            if match is not None:
                best = attrs.evolve(follow(drafts.prediction, match, most), is_predicted=True)
        propose = follow if self.recent is None else vote
        for searched in (own, recent):
            match = None if searched is None else longest_match(searched, end, MIN_MATCH)
            if searched is not None and match is not None and (best is None or match.num_tokens > best.num_matched):
                best = propose(searched, match, most)
        return best if best is not None and best.token_ids else None


def _chances(drafts: SequenceDrafts, draft: Draft) -> list[float]:
    """Return how likely each token of a draft is accepted."""
    chance = drafts.acceptance.chance(draft.num_matched)
    return list(accumulate((chance * share for share in draft.shares), mul))
