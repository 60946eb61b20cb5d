"""How much of a prompt each engine holds, and what that is worth by the tiers that it is in.

Used by `routing.py`. A block on the device counts as one that needs no computing, one in a lower tier as the part of it
that its weight says, since it has to be loaded. Columns are arrays by slot, in blocks.

    blocks of a prompt    0 ........ 4 ........ 7 ........ 9
    an engine has them    on the device  host      disk        4 + 3 * 0.75 + 2 * 0.25 = 6.75

What an engine has in the object store, every engine can have: it goes on from where its own blocks end.

What must always hold: without lower tiers, what blocks are worth is their number; no call takes time in proportion to a
prompt's blocks, only to their logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from ..messages.tiers import LOWER_TIERS, Tier
from .key_index import Match
from .loads import Column
from .lowered_blocks import LoweredBlocks

FEW_SLOTS = 8
"""As many slots of a mask are looked at one by one; of more, an array is made."""
TIER_WEIGHTS: Final[Mapping[Tier, float]] = {Tier.HOST: 0.75, Tier.DISK: 0.25, Tier.REMOTE: 0.1}
"""What a block is worth in each lower tier; on the device it is worth 1. The first two are NVIDIA Dynamo's."""


@attrs.frozen(eq=False)
class Overlap:
    held: Column
    """Blocks of the prompt that each engine would find, in whichever tier."""
    worth: Column
    """What they are worth."""


def weigh(
    lowered: LoweredBlocks, keys: Sequence[bytes], matches: Sequence[Match], held: Column, weights: Mapping[Tier, float]
) -> Overlap:
    """Return what engines hold of a prompt, and what that is worth. `matches` and `held` say the same of all tiers."""
    worth = np.zeros_like(held)
    ends, remote = held, []
    for tier in reversed(LOWER_TIERS):
        faster = lowered.leading_above(tier, keys, matches)
        if faster is None:
            continue
        starts = np.zeros_like(held)
        raise_to(starts, faster)
        worth += weights[tier] * (ends - starts)
        ends = starts
        if tier is Tier.REMOTE:
            remote = _segments(matches, faster)
    worth += ends
    if remote:
        further = held.copy()
        for start, end in remote:
            np.maximum(further, end, out=further, where=held >= start)
        worth += weights[Tier.REMOTE] * (further - held)
        held = further
    return Overlap(held, worth)


def _segments(matches: Sequence[Match], faster: Sequence[Match]) -> list[tuple[int, int]]:
    """Return from where to where engines have blocks in the slowest tier, each pair once."""
    found = {
        (start.num_blocks, end.num_blocks): None
        for end in matches
        for start in faster
        if start.num_blocks < end.num_blocks and start.slots & end.slots
    }
    return list(found)


def raise_to(column: Column, matches: Sequence[Match]) -> None:
    """Raise each engine's number to what was found of it."""
    for match in matches:
        slots, num_blocks = match.slots, match.num_blocks
        if slots.bit_count() > FEW_SLOTS:
            data = np.frombuffer(slots.to_bytes(-(-len(column) // 8), "little"), np.uint8)
            held = np.unpackbits(data, count=len(column), bitorder="little")
            np.maximum(column, num_blocks, out=column, where=held.view(np.bool_))
            continue
        while slots:
            slot = slots.bit_length() - 1
            slots ^= 1 << slot
            if column[slot] < num_blocks:
                column[slot] = num_blocks
