"""What the mover receives, and what it answers: copies of blocks between the device and the host.

The block manager asks for moves; the answers go back to it. A move of n blocks names, by index, the blocks of the
device, the slots of the host tier that are at the other end, and what the blocks contain.
"""

from __future__ import annotations

import msgspec

from .tiers import LoadFailure, Tier


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copy blocks from one tier to another. Answered by one `Moved` or `MoveFailed`; a load that is late before that by
    one `MoveLate`."""

    number: int
    """Counted up; for the answer."""
    source: Tier
    target: Tier
    blocks: list[int]
    """Physical blocks of the device. If it is the target, they are held until the answer is there."""
    slots: list[int]
    """Places in the host tier, likewise whatever the direction."""
    keys: list[bytes]
    """Chain keys: what the source should contain."""


class Moved(msgspec.Struct, frozen=True, gc=False):
    """All blocks of a move have come. The executor has tagged those on the device."""

    number: int


class MoveFailed(msgspec.Struct, frozen=True, gc=False):
    """Some blocks of a move have not come. To the host that is so when they were evicted before they were copied."""

    number: int
    moved: list[int]
    """Indexes of those that have all the same."""
    wrong: dict[int, LoadFailure]
    """Blocks on the host that are not what they should be, by index: missing or corrupt."""
    error: str | None = None
    """What was raised, if anything was."""


class MoveLate(msgspec.Struct, frozen=True, gc=False):
    """Nobody should wait for a load any longer. Its blocks may still be written until its answer is there."""

    number: int


class BarrierPassed(msgspec.Struct, frozen=True, gc=False):
    """The executor has done what it was sent before a `Barrier`."""

    number: int


MoverMessage = Move | BarrierPassed
MoveResult = Moved | MoveFailed
MoveNews = MoveResult | MoveLate
