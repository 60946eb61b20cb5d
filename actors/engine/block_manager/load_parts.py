"""What a load from lower tiers consists of: stretches of a prompt, each of which lies in one tier.

Part of `tier_loads.py`.

What must always hold: the parts of a load are in the order of the sequence's table, without a gap.
"""

from __future__ import annotations

import attrs

from ...messages.peers import Peer
from ...messages.tiers import Tier


@attrs.frozen
class Stretch:
    """Consecutive blocks of a prompt that lie in one tier."""

    tier: Tier
    first: int
    """Index of the first block in the sequence's table."""
    keys: list[bytes]
    peer: Peer | None = None
    """The engine that may have them, if the tier is `peer`."""


@attrs.frozen
class LoadedPrompt:
    """A prompt of which blocks are to be loaded."""

    sequence_id: int
    """The sequence that waits for them, or will; a negative number: none."""
    keys: list[bytes]
    shared: list[int]
    """Its leading blocks that were found on the device."""
    root_key: bytes
    token_ids: list[int]


@attrs.define(eq=False)
class LoadPart:
    """A stretch that is being loaded by one move."""

    stretch: Stretch
    slots: list[int]
    num_loaded: int | None = None
    """Leading blocks that came; None until the move is over."""


@attrs.define(eq=False)
class Load:
    """Blocks that are being loaded to the device for one sequence."""

    sequence_id: int
    first: int
    """Index of the first one in its table; the blocks before it were found on the device, and are held as well."""
    table: list[int]
    keys: list[bytes]
    """Keys of the blocks from `first` on."""
    parts: dict[int, LoadPart]
    """By the number of the move, in the order of the table."""
    parent_key: bytes
    token_ids: list[int]
    epoch: int
    is_wanted: bool = True
    """Whether the sequence waits for it."""
    is_ahead: bool = False
    """It was begun before the sequence arrived."""
    is_late: bool = False
    is_abandoned: bool = False
    waiting_ids: list[int] = attrs.field(factory=list)
    """Other sequences that wait for these blocks."""

    @property
    def is_over(self) -> bool:
        return all(part.num_loaded is not None for part in self.parts.values())

    @property
    def peer_moves(self) -> list[int]:
        """The numbers of its moves from another engine that are not over."""
        return [i for i, part in self.parts.items() if part.stretch.tier is Tier.PEER and part.num_loaded is None]

    def tiers_loaded(self) -> list[Tier]:
        """Return the tier of each leading block that came, up to the first that did not."""
        tiers: list[Tier] = []
        for part in self.parts.values():
            num_loaded = part.num_loaded or 0
            tiers += [part.stretch.tier] * num_loaded
            if num_loaded < len(part.slots):
                break
        return tiers

    def take_waiting(self) -> tuple[int, ...]:
        """Return all sequences that have been waiting for it; from now on none is."""
        own = (self.sequence_id,) if self.is_wanted else ()
        others, self.waiting_ids, self.is_wanted = self.waiting_ids, [], False
        return (*own, *others)


@attrs.frozen
class Loaded:
    """The result of a load."""

    first: int
    blocks: list[int]
    """Loaded blocks, from index `first` of the table on."""
    tiers: list[Tier]
    """Where each came from."""
    is_short: bool = False
    """Whether the block after them was asked for and did not come."""
    is_ahead: bool = False
    """The sequence had not arrived when this was asked for: it may ask once more."""

    def then(self, later: Loaded) -> Loaded:
        """Return this result and that of a later load as one; if there is a gap between them, the later one's."""
        if self.first + len(self.blocks) != later.first:
            return later
        return attrs.evolve(later, first=self.first, blocks=self.blocks + later.blocks, tiers=self.tiers + later.tiers)


@attrs.frozen
class EndedPart:
    """A part that has ended, and its load."""

    load: Load
    part: LoadPart
