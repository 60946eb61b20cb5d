"""What another server's cache holds according to its KV events, which are converted into block keys of our own.

Events carry the tokens of each block, so the keys are computed from these, whatever the publisher hashes with. vLLM's
events are read in either form: maps tagged by `type`, as this server publishes them, and arrays that begin with the
tag. A publisher holds a block as long as it is in any tier; vLLM reports those in lower tiers by name alone.

Pure. What must always hold: a block is known only with all those before it; a gap in the numbers voids all that was
known, since removals may have been missed; no more than `max_blocks` are kept; no step of `take`, which runs in a
thread beside the event loop, holds the interpreter lock for more than some 10 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Final

import attrs
import msgspec

from ..messages.tiers import CACHE_TIERS, Tier
from ..shared.block_keys import chain_keys
from .event_log import GROUP, SEQUENCE_BYTES

MAX_BLOCKS = 1 << 20
"""Blocks of one publisher that are kept; each takes some 250 bytes. Beyond, all are forgotten."""
MAX_BLOCK_SIZE = 4096
MAX_BATCH_BYTES = 8 << 20
"""Of a batch, in which the events are found in one call, a millisecond for each MiB: some 1.6 million tokens."""
MAX_EVENT_BYTES = 1 << 19
"""Of an event, which is decoded in one call: some 100,000 tokens. A publisher's step computes fewer."""
MAX_EVENTS = 16_384
"""Of a batch."""
NEWS_BLOCKS = 2048
"""Stored and removed blocks that are reported to the event loop at once: a millisecond's work there."""
HASHED_TOKENS = 8192
"""In one call."""
_TIERS: Final[dict[str | None, Tier]] = {
    None: Tier.DEVICE,
    **dict.fromkeys(("GPU", "DEVICE"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST),
    **dict.fromkeys(("DISK", "NVME", "STORAGE", "CPU_TIER2"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "REMOTE", "NETWORK", "SHARED"), Tier.REMOTE),
}
"""What vLLM, SGLang and TensorRT-LLM call their tiers (`medium`), as NVIDIA Dynamo's router reads it."""
Hash = bytes | int
NUM_SHARDS = 127
"""Dicts that a publisher's blocks are spread over: one of 700,000 takes 25 ms, in one piece, when it grows."""


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredMap(_Stored, tag="BlockStored"):
    locality: str | None = None
    """`REMOTE` for a tier that is not the publisher's own (vLLM)."""


class _RemovedMap(_Removed, tag="BlockRemoved"):
    locality: str | None = None


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_MAP_TAGS = range(0x80, 0x90)
_LARGE_MAPS = (0xDE, 0xDF)


@attrs.define
class CacheNews:
    """What has changed in a cache: part of a batch, to be applied as `is_cleared`, `removed`, `stored`."""

    is_cleared: bool = False
    """Everything known before is void."""
    stored: list[bytes] = attrs.field(factory=list)
    removed: list[bytes] = attrs.field(factory=list)
    """None of them in `stored`."""
    block_size: int | None = None
    num_blocks: int = 0
    """Known now, in each tier."""


@attrs.define
class _Changes:
    """What has changed since the last news."""

    is_cleared: bool = False
    stored: dict[bytes, None] = attrs.field(factory=dict)
    removed: list[bytes] = attrs.field(factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.stored) + len(self.removed) >= NEWS_BLOCKS


class _KnownBlocks:
    """The keys of blocks, by what the publisher calls them."""

    def __init__(self) -> None:
        self._shards: list[dict[Hash, bytes]] = [{} for _ in range(NUM_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, name: Hash) -> bytes | None:
        return self._shards[hash(name) % NUM_SHARDS].get(name)

    def add(self, name: Hash, key: bytes) -> None:
        self._shards[hash(name) % NUM_SHARDS][name] = key

    def pop(self, name: Hash) -> bytes | None:
        return self._shards[hash(name) % NUM_SHARDS].pop(name, None)

    def clear(self) -> None:
        """Forget all, in pieces: between two of them the interpreter lock may change hands."""
        for shard in self._shards:
            shard.clear()


def chain_root(block_size: int) -> bytes:
    """Return the key from which the chains of other servers' blocks start."""
    return hashlib.sha256(b"quipu-upstream-1:%d" % block_size).digest()


class CacheFollower:
    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known = {tier: _KnownBlocks() for tier in CACHE_TIERS}
        self._last: int | None = None
        self._block_size: int | None = None
        self._changes = _Changes()

    def take(self, sequence: bytes, payload: bytes | memoryview) -> Iterator[CacheNews]:
        """Apply one batch; yield what it changes, about `NEWS_BLOCKS` blocks at a time, and at least once.

        Raises ValueError, after which nothing is known, where a batch cannot be read.
        """
        try:
            if len(sequence) != SEQUENCE_BYTES:
                raise ValueError("no sequence number")
            number = int.from_bytes(sequence, "big")
            if self._last is not None and number != self._last + 1:
                self._clear()
            self._last = number
            if (num_bytes := memoryview(payload).nbytes) > MAX_BATCH_BYTES:
                raise ValueError(f"a batch of {num_bytes} bytes, where {MAX_BATCH_BYTES} are read at most")
            for raw in _batches.decode(payload).events:
                if memoryview(raw).nbytes > MAX_EVENT_BYTES:
                    raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
                for _ in self._apply(bytes(raw)):
                    yield self._take_changes()
        except (msgspec.DecodeError, OverflowError, RecursionError):
            self._clear()
            raise ValueError("no batch of KV events") from None
        except ValueError:
            self._clear()
            raise
        yield self._take_changes()

    def _take_changes(self) -> CacheNews:
        changes, self._changes = self._changes, _Changes()
        stored = list(changes.stored)
        return CacheNews(changes.is_cleared, stored, changes.removed, self._block_size, self._num_blocks)

    @property
    def _num_blocks(self) -> int:
        return sum(map(len, self._known.values()))

    def _find(self, name: Hash) -> bytes | None:
        """Return the key of a block that is in a tier."""
        return next((key for known in self._known.values() if (key := known.get(name)) is not None), None)

    def _tier(self, event: _Stored | _Removed) -> _KnownBlocks | None:
        """Return the known blocks of an event's tier; None for a tier that is not followed."""
        if isinstance(event, _StoredMap | _RemovedMap) and event.locality == "REMOTE":
            return self._known[Tier.REMOTE]
        tier = _TIERS.get(event.medium)
        return None if tier is None else self._known[tier]

    def _apply(self, data: bytes) -> Iterator[None]:
        """Apply an event. Yields whenever there are enough changes to report."""
        first = data[0] if data else 0
        event = (_maps if first in _MAP_TAGS or first in _LARGE_MAPS else _arrays).decode(data)
        match event:
            case _Stored():
                yield from self._store(event)
            case _Removed():
                if event.group_idx in (None, GROUP) and (tier := self._tier(event)) is not None:
                    yield from self._remove(event, tier)
            case _:
                self._clear()

    def _store(self, event: _Stored) -> Iterator[None]:
        size, hashes, tier = event.block_size, event.block_hashes, self._tier(event)
        has_adapter = event.lora_id is not None or event.lora_name is not None
        if has_adapter or event.group_idx not in (None, GROUP) or tier is None:
            return
        if tier is not self._known[Tier.DEVICE]:
            if not event.token_ids:
                self._copy(hashes, tier)
                return
            if self._block_size not in (None, size) or len(event.token_ids) != size * len(hashes):
                return  # vLLM's blocks in lower tiers may be larger than those of its prompts
        if not 0 < size <= MAX_BLOCK_SIZE or len(event.token_ids) != size * len(hashes):
            raise OverflowError
        if size != self._block_size:
            self._clear()
            self._block_size = size
        parent = chain_root(size) if event.parent_block_hash is None else self._find(event.parent_block_hash)
        if parent is None:
            return  # stored before we listened
        if not self._has_room(len(hashes)):
            return
        # a call that hashes holds the interpreter lock
        step = max(1, min(NEWS_BLOCKS, HASHED_TOKENS // size))
        for at in range(0, len(hashes), step):
            keys = chain_keys(parent, event.token_ids[at * size : (at + step) * size], size)
            parent = keys[-1]
            for name, key in zip(hashes[at : at + step], keys, strict=True):
                tier.add(name, key)
                self._changes.stored[key] = None
            if self._changes.is_full:
                yield

    def _copy(self, names: list[Hash], tier: _KnownBlocks) -> None:
        """Note that blocks which are known are also in this tier. The contents of others are not published."""
        if self._has_room(len(names)):
            for name in names:
                if (key := self._find(name)) is not None:
                    tier.add(name, key)

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether there is room for that many more; if not, forget all."""
        if self._num_blocks + num_blocks <= self._max_blocks:
            return True
        self._clear()
        return False

    def _remove(self, event: _Removed, tier: _KnownBlocks) -> Iterator[None]:
        changes = self._changes
        for name in event.block_hashes:
            if (key := tier.pop(name)) is not None and self._find(name) is None:
                changes.stored.pop(key, None)
                changes.removed.append(key)
                if changes.is_full:
                    yield
                    changes = self._changes

    def _clear(self) -> None:
        self._changes = _Changes(is_cleared=True)
        for known in self._known.values():
            known.clear()
