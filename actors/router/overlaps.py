"""How much of a prompt each engine holds, and what that is worth by the tiers that it is in.

Used by `routing.py`. A block on the device counts as one that needs no computing, one in a lower tier as the part of it
that its weight says, since it has to be loaded. Columns are arrays by slot, in blocks.

    blocks of a prompt    0 ........ 4 ...... 7 ...... 9 .......... 19
    an engine has them    on the device  host    disk    object store     4 + 3 * 0.75 + 2 * 0.25 + 10 * 0.1 = 7.75

What is in the object store, every engine has: it goes on there from where its own blocks end.

What must always hold: without lower tiers, what blocks are worth is their number; no call takes time in proportion to a
prompt's blocks, only to their logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from ..messages.tiers import OWN_LOWER_TIERS, Tier
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

    def followed_by(self, matches: Sequence[Match], weight: float) -> Overlap:
        """Return the overlap with what engines find of the prompt elsewhere, where each block is worth `weight`."""
        held = self.held.copy()
        raise_to(held, matches)
        return Overlap(held, self.worth + weight * (held - self.held))


def weigh(
    lowered: LoweredBlocks, keys: Sequence[bytes], matches: Sequence[Match], held: Column, weights: Mapping[Tier, float]
) -> Overlap:
    """Return what engines have of a prompt in their own tiers. `matches` and `held` say the same of all these."""
    worth = np.zeros_like(held)
    ends = held
    for tier in reversed(OWN_LOWER_TIERS):
        faster = lowered.leading_above(tier, keys, matches)
        if faster is None:
            continue
        starts = np.zeros_like(held)
        raise_to(starts, faster)
        worth += weights[tier] * (ends - starts)
        ends = starts
    return Overlap(held, worth + ends)


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
