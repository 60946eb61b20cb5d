"""Proposes the draft tokens of a step, and learns which were accepted.

Called by `step_runner.py`. Drafts come from a sequence's own tokens, from what its client predicts, and, with `suffix`,
from recent outputs of the same tenant (`recent_outputs.py`). How many are verified: `draft_depth.py`.

What must always hold: no step verifies more than `max_tokens` draft tokens; the work is bounded by `MAX_SEARCHED`; a
draft changes when tokens are computed, never which.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from .acceptance import Acceptance, SharedAcceptance
from .draft_depth import FREE, PassCosts, choose_depths, may_pay
from .draft_lookup import MAX_MATCH, Draft, GrowingTokens, Tokens, follow, longest_match, vote
from .recent_outputs import RecentOutputs
from .sequence_state import SequenceState
from .step_rows import StepRows

MIN_MATCH = 2
"""The fewest tokens that have to match."""
MAX_SEARCHED = 1 << 20
"""Tokens that are searched in a step, a fraction of a millisecond each 100,000. Rows beyond have no draft in it."""


_MAX_UNTRIED = 4
"""Tokens of a draft that is not verified of which it is learned whether they were right."""


@attrs.define(eq=False)
class SequenceDrafts:
    """What the drafter knows of one sequence."""

    tokens: GrowingTokens
    prediction: Tokens
    acceptance: Acceptance
    pending: Draft | None = None
    """The draft that is being verified."""
    untried: Draft | None = None
    """A draft that is not verified, and which tokens will show to be right or wrong..."""
    untried_at: int = 0
    """...from this position on."""

    def leave_untried(self, draft: Draft, position: int) -> None:
        """Note a draft for the tokens from this position on, unless another is still open."""
        if self.untried is None and not draft.num_forced:
            token_ids = draft.token_ids[:_MAX_UNTRIED]
            self.untried, self.untried_at = attrs.evolve(draft, token_ids=token_ids), position

    def settle(self) -> None:
        """Learn how many tokens of the untried draft were right, once that is known."""
        if (draft := self.untried) is None:
            return
        num = len(draft.token_ids)
        drawn = self.tokens.ids[self.untried_at : self.untried_at + num].tolist()
        pairs = zip(draft.token_ids, drawn, strict=False)
        num_right = next((at for at, (one, other) in enumerate(pairs) if one != other), len(drawn))
        if num_right < len(drawn) or len(drawn) == num:
            self.acceptance.note(draft.num_matched, num, num_right)
            self.untried = None


PATIENCE = 8
"""Steps without a draft that is worth verifying, after which none is expected."""
MAX_OTHERS = 8
"""Rows that are searched in a step although their last draft was wrong, or they had none: looking for drafts in vain
should cost nothing that can be measured."""


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

    @property
    def expects_drafts(self) -> bool:
        """Whether there may be drafts for the next steps, if their rows may advance by several positions."""
        ...

    def propose(self, rows: StepRows) -> dict[int, Draft]:
        """Return drafts of rows that continue and may advance by several positions; none is empty."""
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
        self._acceptance = SharedAcceptance()
        self._by_sequence: dict[int, SequenceDrafts] = {}
        self._repeating: set[int] = set()
        """Sequences whose last draft was right, at least in part."""
        self._num_steps = 0
        self._num_in_vain = 0
        """Steps since there was a draft that was worth verifying, or could have been in a sequence that is new."""

    @property
    def expects_drafts(self) -> bool:
        """Whether there may be drafts for the next steps.

        If not, steps take one position a row, which needs no blocks for more, and lets a device go on to the next step
        without waiting for the result of this one. Drafts are looked for all the same.
        """
        return self._num_in_vain < PATIENCE

    def propose(self, rows: StepRows) -> dict[int, Draft]:
        """Return drafts of rows that continue and may advance by several positions; none is empty."""
        size = rows.size
        if not may_pay(self.max_tokens, size, self.costs):
            self._num_in_vain = PATIENCE
            return {}
        self._num_in_vain = 0 if rows.num_going_on < len(rows.ids) else self._num_in_vain + 1
        found: list[tuple[int, SequenceDrafts, Draft]] = []
        num_searched = 0
        for place, row in enumerate(self._rows_to_search(rows)):
            state, start = rows.states[row], rows.starts[row]
            most = min(self.max_depth, state.max_len - 2 - start)
            if most <= 0:
                continue
            drafts = self._drafts_of(rows.ids[row], state)
            recent = None if self.recent is None else self.recent.of(state.keys[0])
            num_searched += len(drafts.tokens) + len(drafts.prediction) + (0 if recent is None else len(recent))
            if num_searched > MAX_SEARCHED and place:
                break
            draft = _under_grammar(self._find(drafts, recent, state, most), state, most)
            if draft is not None:
                found.append((row, drafts, draft))
        if not found:
            return {}
        chances = [drafts.acceptance.chances(d.num_matched, d.shares, d.num_forced) for _, drafts, d in found]
        lengths = [rows.ends[row] for row, _, _ in found]
        depths = choose_depths(chances, lengths, self.max_tokens, size, self.costs)
        chosen: dict[int, Draft] = {}
        for (row, drafts, draft), depth in zip(found, depths, strict=True):
            if not depth:
                drafts.leave_untried(draft, len(rows.states[row].tokens))
                self._repeating.discard(rows.ids[row])
                continue
            self._num_in_vain = 0
            depth = min(depth, rows.ends[row] - rows.starts[row] - 1)
            if depth:
                drafts.untried = None
                drafts.pending = chosen[row] = draft.cut(depth)
            else:
                drafts.leave_untried(draft, len(rows.states[row].tokens))  # a later step may verify what is found then
        return chosen

    def note_accepted(self, sequence_id: int, num_accepted: int) -> None:
        """Record how many tokens of a sequence's draft were accepted."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is not None and (draft := drafts.pending) is not None:
            num_guessed, num_right = len(draft.token_ids) - draft.num_forced, num_accepted - draft.num_forced
            if num_guessed and num_right >= 0:
                drafts.acceptance.note(draft.num_matched, num_guessed, num_right)
            drafts.pending = None
            (self._repeating.add if num_accepted else self._repeating.discard)(sequence_id)

    def release(self, sequence_id: int, state: SequenceState) -> None:
        """Forget a sequence, but for its outputs."""
        self._by_sequence.pop(sequence_id, None)
        self._repeating.discard(sequence_id)
        if self.recent is not None:
            self.recent.add(state.keys[0], state.tokens, state.num_outputs)

    def forget_outputs(self) -> None:
        """Forget the outputs of sequences that have ended, and what they said of later ones."""
        self._acceptance = SharedAcceptance()
        if self.recent is not None:
            self.recent.clear()

    def _rows_to_search(self, rows: StepRows) -> list[int]:
        """Return rows whose text repeats or is forced, and a few others, which take turns."""
        repeating: list[int] = []
        others: list[int] = []
        for row in range(rows.num_going_on):
            is_known = rows.ids[row] in self._repeating or _forced_next(rows.states[row])
            (repeating if is_known else others).append(row)
        self._num_steps += 1
        turn = MAX_OTHERS if len(others) > MAX_OTHERS else 1
        first = self._num_steps * turn % max(1, len(others))
        return repeating + (others[first:] + others[:first])[:MAX_OTHERS]

    def _drafts_of(self, sequence_id: int, state: SequenceState) -> SequenceDrafts:
        """Return what is known of a sequence, with all its tokens."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is None:
            tokens = GrowingTokens(state.tokens)
            drafts = self._by_sequence[sequence_id] = SequenceDrafts(
                tokens, GrowingTokens(state.sampling.prediction).ids, self._acceptance.of_sequence(state.keys[0])
            )
        elif len(drafts.tokens) < len(state.tokens):
            drafts.tokens.extend(state.tokens[len(drafts.tokens) :])
        elif len(drafts.tokens) > len(state.tokens):
            drafts.tokens.cut(len(state.tokens))  # a pass was taken back
            drafts.untried = None
        drafts.settle()
        return drafts

    def _find(self, drafts: SequenceDrafts, recent: Tokens | None, state: SequenceState, most: int) -> Draft | None:
        """Return the draft with the longest match; of equal ones, the first source's."""
        own = drafts.tokens.ids
        end = own[-MAX_MATCH:]
        best: Draft | None = None
        if len(drafts.prediction):
            outputs = end[len(end) - min(len(end), state.num_outputs) :]
            match = longest_match(drafts.prediction, outputs, min(MIN_MATCH, len(outputs)))
            if match is not None:
                best = attrs.evolve(follow(drafts.prediction, match, most), is_predicted=True)
        propose = follow if self.recent is None else vote
        for searched in (own, recent):
            match = None if searched is None else longest_match(searched, end, MIN_MATCH)
            if searched is not None and match is not None and (best is None or match.num_tokens > best.num_matched):
                best = propose(searched, match, most)
        return best if best is not None and best.token_ids else None


def _under_grammar(draft: Draft | None, state: SequenceState, most: int) -> Draft | None:
    """Return what of a draft can be verified under the sequence's grammar, if it has one, and what that forces."""
    if state.sampling.grammar is None or (grammar := state.sequence_grammar()) is None:
        return draft
    if draft is not None:
        num = grammar.num_to_follow(draft.token_ids)
        draft = draft.cut(num) if num else None
    forced = grammar.forced_next()[:most]
    return Draft.forced(forced, draft) if forced else draft


def _forced_next(state: SequenceState) -> list[int]:
    return [] if state.grammar is None else state.grammar.forced_next()
