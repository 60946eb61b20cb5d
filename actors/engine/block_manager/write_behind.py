"""Which blocks are stored in a tier that outlives the engine, and in what order: a queue of keys.

Part of the KV-block manager (`lower_tiers.py`), one for the disk and one for the object store. Follows what is
committed on the device; what is worth storing waits here until the tier's one store at a time has room for it.

    all      every block that is committed
    reused   blocks that a second prompt has found or computed again, and those of prompts of `LONG_TOKENS` or more;
             pinned ones are added by `lower_tiers.py`

What must always hold: the queue is bounded, and the newest blocks are those that are kept; nothing waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from ...messages.tiers import Tier
from ...shared.block_keys import KEY_PREFIX_BYTES
from .tier_index import TierIndex

LONG_TOKENS: Final = 4096
"""A prompt of this length is worth storing the first time, because it takes long to compute."""


class StorePolicy(StrEnum):
    """Which blocks are worth storing (`--kv-store`)."""

    ALL = "all"
    REUSED = "reused"


class WriteBehind:
    """The keys that wait to be stored in one tier. An observer of the pool."""

    def __init__(self, index: TierIndex, policy: StorePolicy, max_waiting: int) -> None:
        """`max_waiting`: most keys that wait, and most that are remembered as seen once."""
        self._index = index
        self._policy = policy
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._first: list[bytes] = []
        """Keys that were taken too soon, and go first."""
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        """With `reused`: prefixes of keys that were committed once, the latest last."""

    def __len__(self) -> int:
        return len(self._first) + len(self._waiting)

    def add(self, keys: Iterable[bytes]) -> None:
        """Let blocks wait that are worth storing and are not in the tier yet."""
        waiting, holds = self._waiting, self._index.holds
        for key in keys:
            if key not in waiting and not holds(key):
                waiting[key] = None
                if len(waiting) > self._max_waiting:
                    waiting.popitem(last=False)

    def take(self, count: int) -> list[bytes]:
        """Return up to `count` keys to store now: those that would be evicted otherwise, then those that wait."""
        keys, self._first = self._first[:count], self._first[count:]
        keys += self._index.take_rescues(count - len(keys))
        while self._waiting and len(keys) < count:
            key, _ = self._waiting.popitem(last=False)
            if not self._index.holds(key):
                keys.append(key)
        return keys

    def put_back(self, keys: Sequence[bytes]) -> None:
        """Let keys that were taken wait again, before all others."""
        self._first[:0] = keys

    def on_found(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt has found these blocks in the cache."""
        touch = self._index.touch
        missing = [key for key in keys if not touch(key)]
        if missing:
            self.add(missing)

    # ------------------------------------------------------------ observer of the pool

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
        if tier is not Tier.DEVICE:
            return
        if self._policy is StorePolicy.ALL or len(token_ids) >= LONG_TOKENS:
            self.add(keys)
        else:
            self.add([key for key in keys if self._is_seen(key)])

    def _is_seen(self, key: bytes) -> bool:
        """Return whether a key was seen before, and remember it."""
        prefix = key[:KEY_PREFIX_BYTES]
        if prefix in self._seen:
            self._seen.move_to_end(prefix)
            return True
        self._seen[prefix] = None
        if len(self._seen) > self._max_waiting:
            self._seen.popitem(last=False)
        return False

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        pass

    def on_cleared(self) -> None:
        self._waiting.clear()
        self._first.clear()
        self._seen.clear()
