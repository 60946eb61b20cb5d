"""How likely drafts are right: learned of each sequence, and of those of its tenant before it."""

from __future__ import annotations

import pytest

from quipu.actors.engine.executor import acceptance as acceptance_module
from quipu.actors.engine.executor.acceptance import Acceptance, SharedAcceptance


def first(acceptance: Acceptance, num_matched: int) -> float:
    return acceptance.chances(num_matched, [1.0])[0]


def test_acceptance_follows_the_sequence() -> None:
    """A match that was right is trusted more, one that was wrong less; other lengths of match are not concerned."""
    acceptance = Acceptance()
    before, other = first(acceptance, 2), first(acceptance, 16)
    assert other > before, "a longer match is trusted more from the start"
    for _ in range(20):
        acceptance.note(2, 4, 0)
    assert first(acceptance, 2) < before / 3 and first(acceptance, 16) == other
    for _ in range(60):
        acceptance.note(2, 4, 4)
    assert first(acceptance, 2) > 0.8


def test_chances_of_further_tokens() -> None:
    """A text whose drafts are wrong at once, or right to the end, is known by its further tokens."""
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.note(5, 4, 0)
        acceptance.note(5, 4, 4)
    one, two, three = acceptance.chances(5, [1.0, 1.0, 0.5])
    assert 0.4 < one < 0.6 and two > 0.9 * one and three == pytest.approx(two * two / one * 0.5)


def test_sequences_learn_from_earlier_ones() -> None:
    """A new sequence expects what earlier ones of its root key had, until its own drafts say otherwise."""
    shared = SharedAcceptance()
    earlier = shared.of_sequence(b"tenant")
    for _ in range(30):
        earlier.note(16, 1, 0)
    low, unknown = first(shared.of_sequence(b"tenant"), 16), first(Acceptance(), 16)
    assert low < unknown / 3
    assert first(shared.of_sequence(b"other"), 16) == unknown, "other tenants' drafts say nothing"
    other_than_earlier = shared.of_sequence(b"tenant")
    for _ in range(6):
        other_than_earlier.note(16, 1, 1)
    assert first(other_than_earlier, 16) > 0.6 > first(earlier, 16)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root key that was used least recently is forgotten."""
    monkeypatch.setattr(acceptance_module, "MAX_ROOTS", 2)
    shared = SharedAcceptance()
    for root in (b"a", b"b"):
        shared.of_sequence(root).note(16, 1, 0)
    shared.of_sequence(b"a")
    shared.of_sequence(b"c")
    assert len(shared) == 2
    assert first(shared.of_sequence(b"a"), 16) < first(shared.of_sequence(b"b"), 16)
