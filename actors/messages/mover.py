"""What the mover receives, and what it answers: copies of blocks between the device and the host.

The block manager requests moves; the answers go back to it. For each of its n blocks, a move names the block on the
device, the slot in the host tier, and the key of the contents.
"""

from __future__ import annotations

import msgspec

from .tiers import LoadFailure, Tier


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copy blocks from one tier to another. Answered by one `Moved` or `MoveFailed`, for a late load preceded by one
    `MoveLate`."""

    number: int
    """Consecutive number, repeated in the answer."""
    source: Tier
    target: Tier
    blocks: list[int]
    """Physical blocks on the device. If the device is the target, they are held until the answer arrives."""
    slots: list[int]
    """Slots in the host tier, held until the answer arrives in either direction."""
    keys: list[bytes]
    """Chain keys of the contents that the source should have."""


class Moved(msgspec.Struct, frozen=True, gc=False):
    """All blocks of a move were copied. The executor has tagged those on the device."""

    number: int


class MoveFailed(msgspec.Struct, frozen=True, gc=False):
    """Some blocks of a move were not copied; on the way to the host, because they were evicted first, for example."""

    number: int
    moved: list[int]
    """Indexes of the blocks that were copied."""
    wrong: dict[int, LoadFailure]
    """Blocks on the host that are missing or corrupt, by index."""
    error: str | None = None
    """The exception that was raised, if any."""


class MoveLate(msgspec.Struct, frozen=True, gc=False):
    """A load is late: no sequence should wait for it. Its blocks may still be written until its answer arrives."""

    number: int


class BarrierPassed(msgspec.Struct, frozen=True, gc=False):
    """The executor has run every plan that was sent before a `Barrier`."""

    number: int


MoverMessage = Move | BarrierPassed
MoveResult = Moved | MoveFailed
MoveNews = MoveResult | MoveLate
