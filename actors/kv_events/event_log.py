"""Changes of the prefix cache's contents: the events, their wire format, and their sequence numbers.

An `EventLog` follows the committed contents of the cache (it is an observer of the block pool) and collects what each
grant of the block manager changes. A `BatchQueue` numbers the encoded batches, holds those not sent yet, and keeps the
latest for subscribers that missed some. Both are used by `publisher.py`, which owns the sockets.

The wire format is vLLM's (`vllm/distributed/kv_events.py`, as of 0.32), so that routers that index vLLM's caches can
index these: a batch is an array, an event a map tagged by `type`, a block hash the block's 32-byte key.

What must always hold: a subscriber that applies every batch in order knows exactly the committed keys of each tier; no
number is used twice; nothing here grows without bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from ..messages.tiers import Tier
from .adapted_blocks import AdaptedBlocks
from .block_contents import BlockContents

MEDIA: Final = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "EXTERNAL"}
"""The names of tiers in events: vLLM's for what the executor reads from, whatever the device, and for the host's
memory; SGLang's and NVIDIA Dynamo's for the others."""
IN_MEMORY: Final = (Tier.DEVICE, Tier.HOST)

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Takes the place of a sequence number once everything kept has been sent."""

GROUP = 0
"""The only KV cache group: all layers share one block table."""


class KvEventsError(Exception):
    """A socket for KV events cannot be opened as configured. The message says which one and why."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    """Blocks that can be found from now on, each following the previous one in its chain."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Parent of the first block; None if that begins a chain. It may have been evicted, or never reported."""
    token_ids: list[int]
    """`block_size` token ids for each block, in order."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    """Digest of the adapter that they were computed with; None: none."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The cache is empty: it was reset, or belongs to a new engine."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    """Seconds since the epoch."""
    events: list[Event]
    data_parallel_rank: int | None = None


class EventLog:
    """Collects events until they are taken. Starts with an `AllBlocksCleared`."""

    def __init__(self, block_size: int, *, has_lower_tiers: bool = False) -> None:
        self._block_size = block_size
        self._contents = BlockContents(block_size) if has_lower_tiers else None
        self.adapted = AdaptedBlocks()
        self._events: list[Event] = [AllBlocksCleared()]

    def take(self) -> list[Event]:
        """Return all events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

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
            self._on_copied(keys, tier)
            return
        token_ids = token_ids[start : start + len(keys) * self._block_size]
        parent = parent_key if block_index > 0 else None
        adapter = self.adapted.add(keys, parent_key, is_first=block_index == 0)
        if self._contents is not None:
            self._contents.add(keys, parent, token_ids, adapter)
        self._add_stored(keys, parent, token_ids, MEDIA[tier], adapter)

    def _on_copied(self, keys: Sequence[bytes], tier: Tier) -> None:
        """Add events for blocks copied to a lower tier, each with its tokens and its parent, as on the device."""
        medium = MEDIA[tier]
        for key in keys:
            known = None if self._contents is None else self._contents.find(key)
            if known is None:
                self._add_stored([key], None, [], medium)
            else:
                self._add_stored([key], known.parent, list(known.token_ids), medium, known.adapter)
        if self._contents is not None and tier in IN_MEMORY:
            self._contents.hold(keys)

    def _add_stored(
        self, keys: Sequence[bytes], parent: bytes | None, token_ids: list[int], medium: str, adapter: str | None = None
    ) -> None:
        last = self._events[-1] if self._events else None
        is_alike = isinstance(last, BlockStored) and (last.medium, last.lora_name) == (medium, adapter)
        if isinstance(last, BlockStored) and is_alike and _is_continued(last, parent, token_ids):
            last.block_hashes += keys
            last.token_ids += token_ids
            return
        self._events.append(
            BlockStored(
                block_hashes=list(keys),
                parent_block_hash=parent,
                token_ids=token_ids,
                block_size=self._block_size,
                lora_id=None,
                medium=medium,
                lora_name=adapter,
                group_idx=GROUP,
            )
        )

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        medium = MEDIA[tier]
        if tier is Tier.DEVICE:
            self.adapted.drop(keys)
        if self._contents is not None and tier in IN_MEMORY:
            self._contents.drop(keys)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes += keys
        else:
            self._events.append(BlockRemoved(block_hashes=list(keys), medium=medium, group_idx=GROUP))

    def on_cleared(self) -> None:
        if self._contents is not None:
            self._contents.clear()
        self.adapted.clear()
        self._events = [AllBlocksCleared()]


def _is_continued(last: BlockStored, parent: bytes | None, token_ids: list[int]) -> bool:
    """Return whether blocks continue an event; blocks without tokens continue others without."""
    if not token_ids or not last.token_ids:
        return not token_ids and not last.token_ids
    return parent is not None and last.block_hashes[-1] == parent


@attrs.frozen
class NumberedBatch:
    sequence: int
    payload: bytes

    @property
    def sequence_bytes(self) -> bytes:
        return self.sequence.to_bytes(SEQUENCE_BYTES, "big")


class BatchQueue:
    """Numbers batches from 0. At most `max_queue_size` wait to be sent; the last `buffer_steps` are kept."""

    def __init__(self, *, buffer_steps: int, max_queue_size: int) -> None:
        self._next = 0
        self._unsent: deque[NumberedBatch] = deque(maxlen=max_queue_size)
        self._kept: deque[NumberedBatch] = deque(maxlen=buffer_steps)
        self.num_dropped = 0
        """Batches that were not sent in time. They are kept like the others."""

    def append(self, payload: bytes) -> None:
        """Add the next batch. If too many are waiting, the oldest is not sent, and subscribers see a gap."""
        batch = NumberedBatch(self._next, payload)
        self._next += 1
        self.num_dropped += len(self._unsent) == self._unsent.maxlen
        self._unsent.append(batch)
        self._kept.append(batch)

    def take_unsent(self) -> list[NumberedBatch]:
        unsent = list(self._unsent)
        self._unsent.clear()
        return unsent

    def kept_from(self, sequence: int) -> list[NumberedBatch]:
        """Return the kept batches with this number or a higher one. The first one's is higher if some are lost."""
        return [batch for batch in self._kept if batch.sequence >= sequence]
