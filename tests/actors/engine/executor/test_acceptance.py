"""How likely drafts are right: learned of each sequence, and of those of its tenant before it."""

from __future__ import annotations

import pytest

from quipu.actors.engine.executor import acceptance as acceptance_module
from quipu.actors.engine.executor.acceptance import Acceptance, Kind, Place, SharedAcceptance, Source
from quipu.actors.engine.executor.draft_lookup import GrowingTokens
from quipu.actors.engine.executor.draft_search import Draft
from quipu.actors.engine.executor.sequence_drafts import SequenceDrafts


def kind(num_matched: int, num_agreeing: int = 1, num_voters: int = 1, place: Place = Place.NEXT) -> Kind:
    return Kind.of(Source.PROMPT, place, num_matched, num_agreeing, num_voters)


SHORT, LONG = kind(2), kind(16)
LATER = LONG.of_further(1, 1)


def test_what_is_assumed() -> None:
    """From the start, long matches are trusted more than short ones, and occurrences that agree more than those that do
    not; what follows a gap less than what follows at once."""
    acceptance = Acceptance()
    values = [acceptance.of(kind(num)) for num in (1, 2, 3, 6, 16)]
    assert values == sorted(values) and len(set(values)) == 5
    values = [acceptance.of(kind(2, *votes)) for votes in ((1, 8), (2, 8), (4, 8), (7, 8), (8, 8))]
    assert values == sorted(values) and len(set(values)) == 5
    assert acceptance.of(kind(2, place=Place.BEHIND_GAP)) < acceptance.of(SHORT)
    assert all(0 < acceptance.of(kind(num, votes, votes)) < 1 for num in range(1, 17) for votes in range(1, 33))


def test_acceptance_follows_the_sequence() -> None:
    """A kind that was right is trusted more, one that was wrong less; other kinds are not concerned."""
    acceptance = Acceptance()
    before, other = acceptance.of(SHORT), acceptance.of(LONG)
    for _ in range(20):
        acceptance.note([SHORT, LONG], 0)
    assert acceptance.of(SHORT) < before / 3 and acceptance.of(LONG) == other, (
        "what comes after a wrong token says nothing"
    )
    for _ in range(60):
        acceptance.note([SHORT], 1)
    assert acceptance.of(SHORT) > 0.8


def test_chances_of_further_tokens() -> None:
    """A token is as likely accepted as it and all before it are right; forced ones are."""
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.note([SHORT, LATER, LATER], 0)
        acceptance.note([SHORT, LATER, LATER], 3)
    certain, one, two, three = acceptance.chances([SHORT, LATER, LATER], 1)
    assert certain == 1 and 0.4 < one < 0.6 and two > 0.9 * one and three == pytest.approx(two * two / one)


def test_forced_tokens_say_nothing() -> None:
    """Of a draft that begins with forced tokens, it is learned whether the guesses behind them were right."""
    drafts = SequenceDrafts(GrowingTokens(), GrowingTokens().ids, Acceptance())
    before = drafts.acceptance.of(SHORT)
    draft = drafts.pending = Draft([1, 2, 3, 4, 5], [SHORT, LATER, LATER], num_forced=2)
    drafts.note_verified(draft, 0)
    assert drafts.pending is None and drafts.acceptance.of(SHORT) == before, "the guess was not reached"
    drafts.note_verified(draft, 2)
    assert drafts.acceptance.of(SHORT) < before
    for _ in range(3):
        drafts.note_verified(draft, 3)
    assert drafts.acceptance.of(SHORT) > before


def test_sequences_learn_from_earlier_ones() -> None:
    """A new sequence expects what earlier ones of its root key had, until its own drafts say otherwise."""
    shared = SharedAcceptance()
    earlier = shared.of_sequence(b"tenant")
    for _ in range(30):
        earlier.note([LONG], 0)
    low, unknown = shared.of_sequence(b"tenant").of(LONG), Acceptance().of(LONG)
    assert low < unknown / 3
    assert shared.of_sequence(b"other").of(LONG) == unknown, "other tenants' drafts say nothing"
    other_than_earlier = shared.of_sequence(b"tenant")
    for _ in range(6):
        other_than_earlier.note([LONG], 1)
    assert other_than_earlier.of(LONG) > 0.6 > earlier.of(LONG)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root key that was used least recently is forgotten."""
    monkeypatch.setattr(acceptance_module, "MAX_ROOTS", 2)
    shared = SharedAcceptance()
    for root in (b"a", b"b"):
        shared.of_sequence(root).note([LONG], 0)
    shared.of_sequence(b"a")
    shared.of_sequence(b"c")
    assert len(shared) == 2
    assert shared.of_sequence(b"a").of(LONG) < shared.of_sequence(b"b").of(LONG)
