"""For which rows of a step the draft model guesses, and what that costs.

Used by `drafter.py`, if there is a draft model (`draft_model.py`). A row is guessed for by the model if nothing was
found for it in a text that is more likely right. What its guesses are is only known once it is decided how many are
wanted; how likely they are right, the earlier ones tell (`acceptance.py`).

What must always hold: the draft model runs only if its guesses are expected to make the step's tokens cheaper, its own
passes included, or, seldom, to learn whether they would.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from .acceptance import Kind, Place, Source
from .draft_depth import Drafting
from .draft_model import DraftModel, Wanted
from .draft_search import Draft
from .sequence_drafts import Choice, Offer
from .step_rows import StepRows

FIRST = Kind.of(Source.MODEL, Place.NEXT, 8, 1, 1)
"""A guess of the draft model is first assumed to be right as often as what follows a match of eight tokens..."""
FURTHER = FIRST.of_further(1, 1)
"""...and those after it as what comes next there."""
TRIAL_EVERY = 64
"""Steps in which the draft model might have guessed and did not, after which it guesses one token of one row. Only what
it guesses can tell that it has become worth it."""
TRIAL_LACKING = 256
"""It does so for no row of which it would have to compute more tokens."""


class Choose(Protocol):
    """Decides how many tokens of each offer are worth verifying."""

    def __call__(self, offers: list[Offer], drafting: Drafting | None = None) -> Choice: ...


class ModelDrafts:
    """The draft model, and since when it has not guessed."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._num_passed_over = 0

    def choose(self, rows: StepRows, found: list[Offer], possible: list[Offer], choose: Choose) -> Choice:
        """Choose among what was `found` and what the draft model could guess, its passes included.

        `possible`: its offers, made by `draft_of`, for every row.
        """
        without = choose(found)
        by_row = {offer.row: offer for offer in found}
        by_row |= {offer.row: offer for offer in possible if _is_likelier(offer, by_row.get(offer.row))}
        offers = list(by_row.values())
        catch_up = [self._catch_up_cost(rows, one) if one.draft.is_modeled else None for one in offers]
        best = choose(offers, Drafting(self.model.costs, catch_up))
        if best.rate > without.rate:
            for offer in found:
                if by_row[offer.row] is not offer:
                    offer.leave_untried(rows)
            return best
        return self._with_trial(rows, without, [one for one in offers if one.draft.is_modeled])

    def _with_trial(self, rows: StepRows, choice: Choice, possible: list[Offer]) -> Choice:
        """Return a choice without the draft model, with one guess of it if it has made none for long."""
        self._num_passed_over += bool(possible)
        if self._num_passed_over < TRIAL_EVERY:
            return choice
        taken, most = {offer.row for offer in choice.offers}, min(TRIAL_LACKING, self.model.max_num_tokens - 1)
        for offer in possible:
            lacking = self.model.num_lacking(rows.ids[offer.row], rows.states[offer.row])
            if offer.row not in taken and lacking <= most:
                return attrs.evolve(choice, offers=[*choice.offers, offer], depths=[*choice.depths, 1])
        return choice

    def _catch_up_cost(self, rows: StepRows, offer: Offer) -> float:
        return self.model.catch_up_cost(rows.ids[offer.row], rows.states[offer.row])

    def release(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self.model.release(sequence_id)

    def guess(self, rows: StepRows, chosen: dict[int, Draft]) -> dict[int, Draft]:
        """Return the draft model's drafts with their tokens, by row; without tokens where there are none yet.

        `chosen`: the drafts of a step.
        """
        of_model = {row: draft for row, draft in chosen.items() if draft.is_modeled}
        if not of_model:
            return {}
        self._num_passed_over = 0
        wanted = [Wanted(rows.ids[row], rows.states[row], len(draft.kinds)) for row, draft in of_model.items()]
        guesses = self.model.guess(wanted)
        return {
            row: attrs.evolve(draft, token_ids=token_ids, kinds=draft.kinds[: len(token_ids)])
            for (row, draft), token_ids in zip(of_model.items(), guesses, strict=True)
        }


def draft_of(most: int) -> Draft:
    """Return the draft model's draft of up to so many tokens, without its tokens."""
    return Draft([], [FIRST, *[FURTHER] * (most - 1)], is_modeled=True)


def _is_likelier(offer: Offer, found: Offer | None) -> bool:
    """Return whether the draft model's first token is likelier right than what was found."""
    return found is None or (not found.draft.num_forced and offer.first_chance > found.first_chance)
