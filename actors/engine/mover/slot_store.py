"""The interface of a tier's bytes: slots that hold blocks, each with its header.

Implemented for each tier below the device; called by the mover's carrier, from threads. The block manager decides which
slot holds what, and when it is given to another block: a store knows nothing of order or eviction.

What must always hold: what a slot returns is either what was last written to it, or is recognized by its header or
checksum, which the carrier compares; a call either completes or raises OSError, after which the store is as usable as
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .block_header import BlockHeader

MOST_TOGETHER = 8
"""Maximum number of blocks of one call."""


class SlotStore(Protocol):
    """The bytes of one tier."""

    def write(self, slots: Sequence[int], headers: Sequence[BlockHeader], memory: memoryview) -> None:
        """Store blocks, which lie one after another in `memory`.

        Raises OSError. A slot whose write failed holds nothing afterwards.
        """

    def read(self, slots: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> list[BlockHeader | None]:
        """Fill `memory` with the blocks of `slots`, one after another, and return the header stored with each.

        None: the slot holds nothing, and its part of `memory` is undefined. `keys` are those of the expected blocks;
        the caller compares headers and checksums. Raises OSError.
        """

    def clear(self) -> None:
        """Make sure that a later process finds nothing of what is stored now, in whatever order writes follow.

        Raises OSError.
        """

    def close(self) -> None:
        """Release what the store holds. No other call may be in progress, or follow."""
