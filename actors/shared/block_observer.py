"""What follows the committed contents of the prefix cache: the interface between a block pool and its observers.

Implemented by the KV event log, and by the block manager's miss tracker and key changes; called by the pool and by the
block manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..messages.tiers import Tier


class BlockObserver(Protocol):
    """Follows the committed contents of the cache. Called synchronously; must not raise."""

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """Note that a run of blocks can be found in a tier from now on.

        Their contents are the tokens from `start` on, one block's worth each. `block_index` is the first block's
        position in its chain; `parent_key` is a root key if that is 0. `token_ids`, which is never changed, may be a
        whole prompt: keeping a reference to it keeps all of that in memory. `sequence_id` wrote the blocks; 0: unknown.

        Blocks come to other tiers as copies of blocks that were stored on the device before. With no `token_ids`, only
        `keys`, which need not be a chain then, and `tier` have a meaning.
        """

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        """Note that blocks were evicted from a tier, in this order.

        A block may be removed from the device before or after it is stored on the host.
        """

    def on_cleared(self) -> None:
        """Note that the cache was reset: no tier holds any block."""
