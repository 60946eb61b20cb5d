"""What a drafter knows of one sequence, and the drafts of a step from which it chooses.

Used by `drafter.py` and `model_drafts.py`. What must always hold: it is learned of each token of a draft, verified or
not, unless it was forced or comes behind a wrong one.
"""

from __future__ import annotations

import attrs

from .acceptance import Acceptance
from .draft_lookup import GrowingTokens, Tokens
from .draft_search import Draft
from .step_rows import StepRows

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

    def chances(self, draft: Draft) -> list[float]:
        """Return how likely each token of a draft is right, if those before it are."""
        return self.acceptance.chances(draft.kinds, draft.num_forced)

    def note(self, draft: Draft, num_right: int) -> None:
        """Learn how many of the tokens that a draft guessed were right."""
        self.acceptance.note(draft.kinds, num_right)

    def note_verified(self, draft: Draft, num_accepted: int) -> None:
        """Learn how many of a draft's tokens were accepted. Forced ones say nothing of those that it guessed."""
        self.pending = None
        if num_accepted >= draft.num_forced:
            self.note(draft, num_accepted - draft.num_forced)

    def leave_untried(self, draft: Draft, position: int) -> None:
        """Note a draft for the tokens from this position on, unless another is still open, or it has none yet."""
        if self.untried is None and draft.token_ids and not draft.num_forced:
            self.untried, self.untried_at = draft.cut(_MAX_UNTRIED), position

    def settle(self) -> None:
        """Learn how many tokens of the untried draft were right, once that is known."""
        if (draft := self.untried) is None:
            return
        num = len(draft.token_ids)
        drawn = self.tokens.ids[self.untried_at : self.untried_at + num].tolist()
        pairs = zip(draft.token_ids, drawn, strict=False)
        num_right = next((at for at, (one, other) in enumerate(pairs) if one != other), len(drawn))
        if num_right < len(drawn) or len(drawn) == num:
            self.note(draft, num_right)
            self.untried = None


@attrs.frozen
class Offer:
    """A draft for one row of a step."""

    row: int
    drafts: SequenceDrafts
    draft: Draft

    def leave_untried(self, rows: StepRows) -> None:
        """Learn later whether its first tokens are right, though they are not verified."""
        self.drafts.leave_untried(self.draft, len(rows.states[self.row].tokens))

    @property
    def first_chance(self) -> float:
        """How likely its first token is right."""
        return self.drafts.chances(self.draft)[0]


@attrs.frozen
class Choice:
    """How many tokens of each offer are verified."""

    offers: list[Offer]
    depths: list[int]
    rate: float
    """Tokens that are to be expected for a unit of cost."""
