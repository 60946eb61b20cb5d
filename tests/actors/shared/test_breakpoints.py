"""Breakpoints in whole blocks, and the pins that they ask for."""

from __future__ import annotations

from quipu.actors.messages.prompts import Breakpoint, CacheTtl, Pin
from quipu.actors.shared.breakpoints import in_whole_blocks, pins_of

SIZE = 4
SHORT, LONG = CacheTtl.FIVE_MINUTES, CacheTtl.ONE_HOUR


def test_breakpoints_end_with_full_blocks() -> None:
    """A breakpoint covers tokens up to its last full block; two that end with the same block are one, with the longer
    ttl."""
    breakpoints = (Breakpoint(3, LONG), Breakpoint(9, SHORT), Breakpoint(11, LONG), Breakpoint(16, SHORT))
    assert pins_of(breakpoints, SIZE) == (Pin(2, 3600), Pin(4, 300))
    whole = in_whole_blocks(breakpoints, SIZE)
    assert [(b.position, b.ttl) for b in whole] == [(0, LONG), (8, SHORT), (8, LONG), (16, SHORT)]
