"""Cache breakpoints in units of blocks: what the tokenizer asks the block manager to pin for a prompt.

Used by the tokenizer. What must always hold: a pin ends with a full block, at or before its breakpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..messages.prompts import Breakpoint, CacheTtl, Pin

TTL_S = {CacheTtl.FIVE_MINUTES: 300, CacheTtl.ONE_HOUR: 3600}


def in_whole_blocks(breakpoints: Iterable[Breakpoint], block_size: int) -> tuple[Breakpoint, ...]:
    """Round breakpoints down to block boundaries: a block that extends past one is specific to its own prompt."""
    return tuple(attrs.evolve(b, position=b.position // block_size * block_size) for b in breakpoints)


def pins_of(breakpoints: Iterable[Breakpoint], block_size: int) -> tuple[Pin, ...]:
    """Return the prefixes to pin for a prompt's breakpoints, shortest first.

    `breakpoints` are in order of position. Breakpoints that end with the same block give one pin with the longest of
    their times to live.
    """
    ttl_s: dict[int, int] = {}
    for breakpoint_ in breakpoints:
        num_blocks = breakpoint_.position // block_size
        if num_blocks:
            ttl_s[num_blocks] = max(ttl_s.get(num_blocks, 0), TTL_S[breakpoint_.ttl])
    return tuple(Pin(num_blocks, ttl) for num_blocks, ttl in ttl_s.items())
