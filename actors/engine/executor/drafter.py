"""Proposes the draft tokens of a step, and learns which were accepted.

Called by `step_runner.py`. Drafts come from a sequence's own tokens, from what its client predicts, with `suffix` from
recent outputs of the same tenant (`recent_outputs.py`), and from a draft model, if there is one (`model_drafts.py`).
How many are verified: `draft_depth.py`.

What must always hold: no step verifies more than `max_tokens` draft tokens; the work is bounded by `MAX_SEARCHED`; a
draft changes when tokens are computed, never which.
"""

from __future__ import annotations

from typing import Protocol

from .acceptance import SharedAcceptance, Source
from .draft_depth import FREE, Drafting, PassCosts, StepSize, choose_depths, may_pay
from .draft_lookup import MAX_MATCH, GrowingTokens, Tokens
from .draft_search import GAP, Draft, Text, find_draft
from .model_drafts import ModelDrafts, draft_of
from .recent_outputs import RecentOutputs
from .sequence_drafts import Choice, Offer, SequenceDrafts
from .sequence_state import SequenceState
from .step_rows import StepRows

MAX_SEARCHED = 1 << 19
"""Tokens that are searched in a step, a fraction of a millisecond each 100,000. Rows beyond have no draft in it."""
FEW_ROWS = 2
"""If a step has no more rows, texts are searched twice for each."""

PATIENCE = 8
"""Steps without a draft that is worth verifying, after which none is expected."""
MAX_OTHERS = 8
"""Rows that are searched in a step although their last draft was wrong, or they had none. If there are more, or no
draft was worth it lately, one of them has its turn: looking in vain should cost nothing that can be measured."""


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

    def __init__(
        self,
        *,
        max_depth: int,
        max_tokens: int,
        shares_outputs: bool,
        costs: PassCosts = FREE,
        model: ModelDrafts | None = None,
    ) -> None:
        """`shares_outputs`: whether recent outputs of the same tenant are searched, too."""
        self.max_depth = max_depth
        self.max_tokens = max_tokens
        self.costs = costs
        self.recent = RecentOutputs() if shares_outputs else None
        self.model = model
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
        choice = self._choose(rows, size)
        chosen: dict[int, Draft] = {}
        for offer, depth in zip(choice.offers, choice.depths, strict=True):
            row, drafts, draft = offer.row, offer.drafts, offer.draft
            if not depth:
                offer.leave_untried(rows)
                self._repeating.discard(rows.ids[row])
                continue
            self._num_in_vain = 0
            depth = min(depth, rows.ends[row] - rows.starts[row] - 1)
            if depth:
                drafts.pending = chosen[row] = draft.cut(depth)
                drafts.untried = drafts.untried if draft.is_modeled else None
            else:
                offer.leave_untried(rows)  # a later step may verify what is found then
        return chosen if self.model is None else self._with_guesses(self.model, rows, chosen)

    def _choose(self, rows: StepRows, size: StepSize) -> Choice:
        """Return the drafts that there are for a step, and how much of each is worth verifying."""

        def choose(offers: list[Offer], drafting: Drafting | None = None) -> Choice:
            chances = [offer.drafts.chances(offer.draft) for offer in offers]
            lengths = [rows.ends[offer.row] for offer in offers]
            depths = choose_depths(chances, lengths, self.max_tokens, size, self.costs, drafting)
            return Choice(offers, depths.of_rows, depths.rate)

        found = self._search(rows)
        if self.model is None:
            return choose(found)
        possible = [
            Offer(row, self._drafts_of(rows.ids[row], rows.states[row]), draft_of(most))
            for row in range(rows.num_going_on)
            if (most := self._most(rows, row)) > 0 and not rows.states[row].has_ended
        ]
        return self.model.choose(rows, found, possible, choose)

    def _search(self, rows: StepRows) -> list[Offer]:
        """Return the drafts that are found in texts, or forced by grammars."""
        found: list[Offer] = []
        to_search = self._rows_to_search(rows)
        num_searched, num_searches = 0, 2 if rows.num_going_on <= FEW_ROWS else 1
        for place, row in enumerate(to_search):
            state = rows.states[row]
            most = self._most(rows, row)
            if most <= 0:
                continue
            drafts = self._drafts_of(rows.ids[row], state)
            recent = None if self.recent is None else self.recent.of(state.keys[0])
            num_searched += len(drafts.tokens) + len(drafts.prediction) + (0 if recent is None else len(recent))
            if num_searched > MAX_SEARCHED and place:
                break
            draft = _under_grammar(self._find(drafts, recent, state, most, num_searches), state)
            if draft.token_ids:
                found.append(Offer(row, drafts, draft))
        return found

    def _with_guesses(self, model: ModelDrafts, rows: StepRows, chosen: dict[int, Draft]) -> dict[int, Draft]:
        """Return the drafts of a step with what the draft model guesses."""
        for row, draft in model.guess(rows, chosen).items():
            state, drafts = rows.states[row], self._by_sequence[rows.ids[row]]
            allowed = _under_grammar(draft, state)
            if allowed.token_ids:
                drafts.pending = chosen[row] = allowed
                continue
            drafts.pending = None
            del chosen[row]
            drafts.note(draft, 0)  # no token that the grammar allows, if any
        return chosen

    def note_accepted(self, sequence_id: int, num_accepted: int) -> None:
        """Record how many tokens of a sequence's draft were accepted."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is not None and (draft := drafts.pending) is not None:
            drafts.note_verified(draft, num_accepted)
            if not draft.is_modeled:
                (self._repeating.add if num_accepted else self._repeating.discard)(sequence_id)

    def release(self, sequence_id: int, state: SequenceState) -> None:
        """Forget a sequence, but for its outputs."""
        self._by_sequence.pop(sequence_id, None)
        self._repeating.discard(sequence_id)
        if self.model is not None:
            self.model.release(sequence_id)
        if self.recent is not None:
            self.recent.add(state.keys[0], state.tokens, state.num_outputs)

    def forget_outputs(self) -> None:
        """Forget the outputs of sequences that have ended, and what they said of later ones."""
        self._acceptance = SharedAcceptance()
        if self.recent is not None:
            self.recent.clear()

    def _most(self, rows: StepRows, row: int) -> int:
        """Return how many tokens of a row may be guessed: the last one that it may have is drawn behind them."""
        return min(self.max_depth, rows.states[row].max_len - 2 - rows.starts[row])

    def _rows_to_search(self, rows: StepRows) -> list[int]:
        """Return rows whose text repeats or is forced, and a few others, which take turns."""
        repeating: list[int] = []
        others: list[int] = []
        for row in range(rows.num_going_on):
            if rows.states[row].has_ended:
                continue  # planned before that was known: what it draws is given to nobody
            is_known = rows.ids[row] in self._repeating or _forced_next(rows.states[row])
            (repeating if is_known else others).append(row)
        self._num_steps += 1
        most = MAX_OTHERS if self.expects_drafts and len(others) <= MAX_OTHERS else 1
        turn = most if len(others) > most else 1
        first = self._num_steps * turn % max(1, len(others))
        return repeating + (others[first:] + others[:first])[:most]

    def _drafts_of(self, sequence_id: int, state: SequenceState) -> SequenceDrafts:
        """Return what is known of a sequence, with all its tokens."""
        drafts = self._by_sequence.get(sequence_id)
        if drafts is None:
            tokens = GrowingTokens(state.tokens)
            drafts = self._by_sequence[sequence_id] = SequenceDrafts(
                tokens,
                GrowingTokens(state.sampling.prediction).ids,
                self._acceptance.of_sequence(state.keys[0]),
            )
        elif len(drafts.tokens) < len(state.tokens):
            drafts.tokens.extend(state.tokens[len(drafts.tokens) :])
        elif len(drafts.tokens) > len(state.tokens):
            drafts.tokens.cut(len(state.tokens))  # a pass was taken back
            drafts.untried = None
        drafts.settle()
        return drafts

    def _find(
        self, drafts: SequenceDrafts, recent: Tokens | None, state: SequenceState, most: int, num_searches: int
    ) -> Draft:
        """Return the likeliest draft of all texts."""
        own = drafts.tokens.ids
        texts = [Text(Source.OUTPUT, own, len(own) - state.num_outputs)]
        if len(drafts.prediction):
            texts.insert(0, Text(Source.PREDICTION, drafts.prediction))
        if recent is not None:
            texts.append(Text(Source.RECENT, recent))
        return find_draft(
            texts,
            own[-MAX_MATCH - GAP :],
            drafts.acceptance,
            forced=_forced_next(state),
            most=most,
            num_searches=num_searches,
        )


def _under_grammar(draft: Draft, state: SequenceState) -> Draft:
    """Return what of a draft can be verified under the sequence's grammar, if it has one."""
    if state.sampling.grammar is None or (grammar := state.sequence_grammar()) is None:
        return draft
    return draft.cut(grammar.num_to_follow(draft.token_ids))


def _forced_next(state: SequenceState) -> list[int]:
    return [] if state.grammar is None else state.grammar.forced_next()
