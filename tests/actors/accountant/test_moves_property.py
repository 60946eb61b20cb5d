"""Drawn histories of one sequence over several engines, against an oracle that keeps one state per position.

Engines die heard and unheard, end the sequence for another one, preempt it, have blocks of their own, and get blocks
from each other, completely or not.
"""

from __future__ import annotations

from collections import Counter

import attrs
from hypothesis import event, given
from hypothesis import strategies as st

from quipu.actors.accountant.account import Account
from quipu.actors.accountant.account_entries import EngineLost, Entry, FirstToken, HandedOver, Span
from quipu.actors.messages.accountant import Side
from quipu.actors.messages.counts import Known
from tests.actors.accountant.accounts import account_of, admission, finish

PROMPT, BLOCK = 22, 4


@attrs.define
class History:
    """Entries, and what an observer who saw every position knows of them."""

    entries: list[Entry] = attrs.field(factory=list)
    first: dict[int, str] = attrs.field(factory=dict)
    """How each position was covered first."""
    recomputed: int = 0
    moved: Counter[int | None] = attrs.field(factory=Counter)
    cached: int | None = None
    engines: list[int] = attrs.field(factory=list)
    """Those that were heard of, in order."""
    num_known: int = PROMPT
    """Tokens of the sequence: the prompt and reported outputs."""
    has_token: bool = False

    def cover(self, position: int, how: str, *, is_work: bool) -> None:
        if position not in self.first:
            self.first[position] = how
        elif is_work:
            self.recomputed += 1

    def count(self, how: str) -> int:
        return sum(word == how for position, word in self.first.items() if position < PROMPT)


def draw_admission(draw: st.DrawFn, history: History, engine: int, number: int, side: Side) -> int:
    """Admit the sequence on an engine. Return the number of tokens that it finds."""
    num_blocks = draw(st.integers(0, (history.num_known - 1) // BLOCK))
    sources = [draw(st.sampled_from(["device", "host", "peer"])) for _ in range(num_blocks)]
    if not history.engines and not history.entries:
        sources = ["device" if source == "peer" else source for source in sources]  # nothing has sent it anything
    spans: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        if source != "device":
            spans.setdefault(source, []).extend((index * BLOCK, (index + 1) * BLOCK))
    tiers = {tier: BLOCK * num for tier, num in Counter(sources).items()}
    num_found = num_blocks * BLOCK
    admitted = admission(number, num_found, num_found, tiers=tiers, tier_spans=spans, side=side)
    history.entries.append(attrs.evolve(admitted, engine_id=engine, incarnation=engine))
    is_first = history.cached is None
    if is_first:
        history.cached = sum(BLOCK for source in sources if source != "peer")
    for position in range(num_found):
        is_moved = sources[position // BLOCK] == "peer"
        if is_moved and position < PROMPT:
            history.moved[engine] += 1
        is_work = not is_moved and not (side is Side.DECODE and number == 1)
        history.cover(position, "read" if is_first and not is_moved else "restored", is_work=is_work)
    history.engines.append(engine)
    return num_found


def draw_computation(draw: st.DrawFn, history: History, start: int, stop: int) -> None:
    """Compute up to some position, in chunks while the tokens are known."""
    while start < stop:
        end = stop - draw(st.integers(0, stop - start - 1))
        history.entries.append(Span(start, end))
        for position in range(start, end):
            history.cover(position, "computed", is_work=True)
        start = end
    if stop >= history.num_known:
        history.num_known = stop + 1
        if not history.has_token:
            history.has_token = True
            history.entries.append(FirstToken(12.0))


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    num_engines = draw(st.integers(1, 5))
    side = Side.PREFILL
    for engine in range(num_engines):
        is_last = engine == num_engines - 1
        if not is_last and draw(st.booleans()) and draw(st.booleans()):
            history.entries.append(EngineLost(engine))  # before it was heard of
            continue
        number = 1
        num_found = draw_admission(draw, history, engine, number, side)
        while draw(st.integers(0, 3)) == 3:
            draw_computation(draw, history, num_found, draw(st.integers(num_found, history.num_known)))
            number += 1
            num_found = draw_admission(draw, history, engine, number, side)
        least = max(num_found, PROMPT, history.num_known - 1) if is_last else num_found
        most = max(least, history.num_known) + draw(st.integers(0, 2 * BLOCK))
        draw_computation(draw, history, num_found, draw(st.integers(least, most)))
        if not is_last:
            dies = draw(st.booleans())
            history.entries.append(EngineLost(engine) if dies else HandedOver())
            side = draw(st.sampled_from(Side)) if dies else Side.DECODE
    return history


def account_of_history(history: History) -> Account:
    account = account_of(PROMPT)
    for entry in history.entries:
        account.apply(1, attrs.evolve(entry) if isinstance(entry, Span) else entry)
    return account


@given(histories())
def test_each_position_is_first_covered_once(history: History) -> None:
    """Over all engines: one first coverage each, whatever moved; the client hears of the first engine's own cache."""
    account = account_of_history(history)
    finish(account, 1)
    event(f"engines: {len(set(history.engines))}, moved: {bool(history.moved)}")
    assert account.problems() == []
    record = account.record(20.0)
    assert record.cached == Known(history.cached or 0)
    assert sum((record.cached_by_tier or {}).values()) == history.cached
    assert (record.computed_tokens, record.restored_tokens) == (history.count("computed"), history.count("restored"))
    assert account.sequences[1].read == history.count("read") == history.cached
    assert record.computed_tokens + record.restored_tokens + history.count("read") == PROMPT
    assert record.recomputed_tokens == history.recomputed
    assert (account.moved, record.moved_tokens) == (history.moved, history.moved.total())
    first, last = history.engines[0], history.engines[-1]
    assert (record.engine, record.decode_engine) == (first, None if last == first else last)


@given(histories(), st.data())
def test_aborted_anywhere(history: History, data: st.DataObject) -> None:
    """An account that ends in the middle of a history adds up as well, and its client has heard nothing else."""
    history.entries = history.entries[: data.draw(st.integers(0, len(history.entries)))]
    account = account_of_history(history)
    assert account.problems() == []
    if account.admitted_prompts:
        assert account.cached == Known(history.cached or 0)
    record, sequence = account.record(20.0), account.sequences[1]
    covered = sum(max(0, min(end, PROMPT) - start) for start, end in sequence.covered.intervals)
    assert sequence.read + record.computed_tokens + record.restored_tokens == covered
