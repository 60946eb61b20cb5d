"""Following answers in one process: the limits on CPU time, and when masks are computed."""

from __future__ import annotations

from itertools import chain, cycle

import numpy as np
import pytest

from quipu.actors.engine.executor.mask_rows import MAX_COUNTED_S, MAX_DEBT_S, SLICE_TOKENS, RowAsk, RowMasks
from quipu.actors.grammars.grammar_library import MAX_MASK_S, GrammarTooComplex, Matcher, Words
from quipu.actors.grammars.grammar_text import grammar_text
from tests.grammars import regex, tiny_grammars
from tests.tiny import TINY
from tests.vocabularies import Vocabulary

DIGITS = grammar_text(regex("[0-9]+"))
(SEVEN,) = Vocabulary(TINY).library.list_ids("7", add_special_tokens=False)


class TurnClock:
    """A clock of CPU time that advances by the given seconds for each mask in turn."""

    def __init__(self, *mask_s: float) -> None:
        self._mask_s = cycle(chain.from_iterable((0.0, one) for one in mask_s))
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += next(self._mask_s)
        return self._now_s


def rows_of(*mask_s: float) -> RowMasks:
    return RowMasks(tiny_grammars(), DIGITS, can_end=True, clock=TurnClock(*mask_s))


def ask(row: int, token_ids: list[int], *, is_new: bool = False) -> RowAsk:
    return RowAsk(row, is_new, token_ids, 0, None, ends_early=True)


def test_costly_masks_end_their_own_sequence() -> None:
    """A sequence whose masks keep taking too long fails once it has exceeded its budget; others in its steps do not."""
    over_s = MAX_COUNTED_S - MAX_MASK_S
    rows = rows_of(MAX_MASK_S + over_s, MAX_MASK_S)
    num_steps = int(MAX_DEBT_S / over_s)
    for step in range(num_steps + 40):
        drawn = [SEVEN] if step else []
        if step < num_steps:
            assert rows.mask(ask(0, drawn)).any()
        else:
            with pytest.raises(GrammarTooComplex, match="too complex"):
                rows.mask(ask(0, drawn))
        assert rows.mask(ask(1, drawn)).any()


def test_one_slow_mask_is_no_failure() -> None:
    """A mask may take longer now and then, as may one that follows all outputs again; but fast masks earn no credit.

    How long a slow mask took does not matter: a virtual machine may have been stopped for 0.2 s.
    """
    slow_s = 0.2
    at_times = [slow_s, *[0.0] * 3]
    rows = rows_of(*at_times, *at_times, *[0.0] * 100, *[slow_s] * 4)
    for _ in range(2 * len(at_times) + 100 + 3):
        assert rows.mask(ask(0, [SEVEN])).any()
    with pytest.raises(GrammarTooComplex):
        rows.mask(ask(0, [SEVEN]))

    outputs = [SEVEN] * 200
    assert rows_of(len(outputs) * MAX_MASK_S).mask(ask(0, outputs)).any()


def test_first_mask_is_computed_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's first mask is computed before the grammar counts as ready, so that no step waits for it."""
    filled: list[Matcher] = []
    fill = Matcher.fill

    def fill_and_note(matcher: Matcher, words_W: Words) -> None:
        filled.append(matcher)
        fill(matcher, words_W)

    monkeypatch.setattr(Matcher, "fill", fill_and_note)
    rows_of(0.0)
    assert len(filled) == 1


def test_each_piece_of_work_has_a_limit() -> None:
    """The limit on CPU time starts anew for each slice of tokens and for the mask, however long an answer is."""
    armed: list[int] = []
    rows = RowMasks(tiny_grammars(), DIGITS, can_end=True, arm=lambda: armed.append(1))
    rows.mask(ask(0, [SEVEN] * (3 * SLICE_TOKENS + 1)))
    assert len(armed) >= 5
    armed.clear()
    rows.mask(ask(0, []))
    assert 1 <= len(armed) <= 2


def test_sequence_that_begins_anew() -> None:
    """A sequence's earlier tokens are forgotten when its answer starts anew, and when the sequence has ended."""
    rows = RowMasks(tiny_grammars(), grammar_text(regex("[0-9]{2}")), can_end=True)
    first = rows.mask(ask(0, []))
    last = rows.mask(ask(0, [SEVEN, SEVEN]))
    assert not np.array_equal(first, last)
    assert np.array_equal(rows.mask(ask(0, [], is_new=True)), first)
    rows.mask(ask(0, [SEVEN]))
    rows.forget(0)
    assert np.array_equal(rows.mask(ask(0, [])), first)
