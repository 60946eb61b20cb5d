"""The tokens that a prompt's breakpoints are reported to have created, against a count position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.accountant.account_entries import Admission
from quipu.actors.accountant.prompt_account import PromptAccount
from quipu.actors.messages.prompts import Breakpoint, CacheTtl

LENGTH = 40
SHORT, LONG = CacheTtl.FIVE_MINUTES, CacheTtl.ONE_HOUR
POSITIONS = st.integers(0, LENGTH)


def book(cached: int | None, *breakpoints: Breakpoint) -> PromptAccount:
    prompt = PromptAccount(LENGTH, breakpoints)
    prompt.admit(Admission(number=1, reused=cached, read=cached or 0, miss=None, incarnation=1, at=0.0))
    return prompt


@given(
    cached=POSITIONS,
    spans=st.lists(st.tuples(POSITIONS, POSITIONS), max_size=5),
    marks=st.lists(st.tuples(POSITIONS, st.sampled_from(CacheTtl)), max_size=4),
    pinned=st.lists(POSITIONS, max_size=3),
)
def test_each_position_is_created_once(
    cached: int, spans: list[tuple[int, int]], marks: list[tuple[int, CacheTtl]], pinned: list[int]
) -> None:
    """A position is created by the first breakpoint after it, if it was written, is pinned and was not read.

    The parts never exceed what was written.
    """
    breakpoints = [Breakpoint(position, ttl) for position, ttl in sorted(marks)]
    prompt = book(cached, *breakpoints)
    for start, end in spans:
        prompt.written.add(start, end)
    for end in pinned:
        prompt.pin(end)
    expected = dict.fromkeys(CacheTtl, 0)
    for position in range(LENGTH):
        written = any(start <= position < end for start, end in spans) and position >= cached
        after = next((b for b in breakpoints if position < b.position), None)
        if written and after is not None and position < max(pinned, default=0):
            expected[after.ttl] += 1
    assert prompt.created == expected
    assert sum(prompt.created.values()) <= prompt.cache_write_tokens <= LENGTH - cached


def test_created_tokens_are_frozen_at_first_token() -> None:
    """What is written or pinned later is not charged to the client."""
    prompt = book(0, Breakpoint(16, LONG), Breakpoint(32, SHORT))
    prompt.written.add(0, 24)
    prompt.pin(16)
    prompt.freeze_written()
    prompt.written.add(24, LENGTH)
    prompt.pin(32)
    assert prompt.created == {LONG: 16, SHORT: 0}


def test_nothing_is_created_if_reads_are_unknown() -> None:
    """A router's estimate may cover the very tokens that were written, so the parts of the prompt could overlap."""
    prompt = book(None, Breakpoint(32, SHORT))
    prompt.estimated = 32
    prompt.written.add(0, 32)
    prompt.pin(32)
    assert prompt.created == {LONG: 0, SHORT: 0}
