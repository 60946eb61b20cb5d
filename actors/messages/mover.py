"""What the mover receives, and what it answers: copies of blocks between the tiers of the KV cache.

The block manager requests moves; the answers go back to it. For each of its n blocks, a move names where it lies, where
it is to lie, and the key of the contents.
"""

from __future__ import annotations

import msgspec

from .peers import Peer
from .tiers import LoadFailure, Tier


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copy blocks from one tier to another. Answered by one `Moved` or `MoveFailed`, for a late load preceded by one
    `MoveLate`."""

    number: int
    """Consecutive number, repeated in the answer."""
    source: Tier
    target: Tier
    sources: list[int]
    """Slots of the source, which are held until the answer arrives; if it is the device, physical blocks, not held."""
    targets: list[int]
    """Slots of the target, or physical blocks, held until the answer arrives."""
    keys: list[bytes]
    """Chain keys of the contents that the source should have."""
    peer: Peer | None = None
    """The engine to fetch from, if the source is `peer`. Its slots have no meaning then."""
    waits: bool = False
    """Whether the peer is still computing the blocks, and they are fetched one after the other as they come."""


class Moved(msgspec.Struct, frozen=True, gc=False):
    """All blocks of a move were copied. The executor has tagged those on the device."""

    number: int
    seconds: float = 0.0
    """How long the copy took."""


class MoveFailed(msgspec.Struct, frozen=True, gc=False):
    """Some blocks of a move were not copied; those from the device, because they were evicted first, for example."""

    number: int
    moved: list[int]
    """Indexes of the blocks that were copied."""
    wrong: dict[int, LoadFailure]
    """Blocks that are missing or corrupt in the source, by index."""
    error: str | None = None
    """The exception that was raised, if any."""
    lost_tier: Tier | None = None
    """The tier whose memory has failed, so that it is of no use any more."""


class MoveLate(msgspec.Struct, frozen=True, gc=False):
    """A load is late: no sequence should wait for it. Its blocks may still be written until its answer arrives."""

    number: int


class HurryMove(msgspec.Struct, frozen=True, gc=False):
    """Fetch what the peer has by now, and wait for nothing more: a sequence waits for the blocks. Ignored if over."""

    number: int


class EndMove(msgspec.Struct, frozen=True, gc=False):
    """Fetch nothing more: nobody wants the blocks. Its answer comes all the same. Ignored if over."""

    number: int


class ClearTier(msgspec.Struct, frozen=True, gc=False):
    """Make sure that a later life of the engine finds nothing of what a tier holds now. Answered by `TierCleared`."""

    tier: Tier


class TierCleared(msgspec.Struct, frozen=True, gc=False):
    """A `ClearTier` has been carried out, or has failed."""

    tier: Tier
    has_failed: bool = False


class ListTier(msgspec.Struct, frozen=True, gc=False):
    """Find out what a tier that other servers share holds. Answered by `ListedPage`, the last of which says so, or by
    `ListingFailed`."""

    tier: Tier


class ListedPage(msgspec.Struct, frozen=True, gc=False):
    """Names that a listing has found."""

    names: list[bytes]
    is_last: bool
    """The listing is complete with this one."""


class ListingFailed(msgspec.Struct, frozen=True, gc=False):
    """A listing has ended without its last page."""

    error: str


class BarrierPassed(msgspec.Struct, frozen=True, gc=False):
    """The executor has run every plan that was sent before a `Barrier`."""

    number: int


class Lend(msgspec.Struct, frozen=True, gc=False):
    """Lend the leading ones of these blocks, which a peer fetches. Sent to the KV-block manager; answered by `Lent`."""

    number: int
    keys: list[bytes]
    waits: bool
    """Whether the answer waits until there is at least one. `EndLend` ends the wait."""


class EndLend(msgspec.Struct, frozen=True, gc=False):
    """Blocks that were lent have been copied, or nobody waits for them any longer. Not answered."""

    number: int


class Lent(msgspec.Struct, frozen=True, gc=False):
    """Blocks that hold the leading ones of some keys, all written. They are held until `EndLend`."""

    number: int
    blocks: list[int]
    """Empty: the first is not there."""


MoverRequest = Move | HurryMove | EndMove | ClearTier | ListTier | Lent
MoverMessage = MoverRequest | BarrierPassed
Lending = Lend | EndLend
MoveResult = Moved | MoveFailed
MoveNews = MoveResult | MoveLate | ListedPage | ListingFailed | TierCleared
