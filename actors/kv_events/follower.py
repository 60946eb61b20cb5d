"""What another server's cache holds, as far as its KV events say: the events, turned into block keys of our own.

Events carry the tokens of each block, so the keys are computed from these, whatever the publisher hashes with. Read are
vLLM's events in either form: maps tagged by `type`, as this server publishes them, and arrays that begin with the tag.

Pure. What must always hold: a block is only known with all those before it; after a gap in the numbers nothing is known
that was known before, since what was removed meanwhile cannot be told; no more than `max_blocks` are kept.
"""

from __future__ import annotations

import hashlib
from typing import Any

import attrs
import msgspec

from ..shared.block_keys import chain_keys
from .event_log import GROUP, MEDIUM_DEVICE, SEQUENCE_BYTES

MAX_BLOCKS = 1 << 20
"""Blocks of one publisher that are kept; each takes some 250 bytes. Beyond, all are forgotten."""
MAX_BLOCK_SIZE = 4096
Hash = bytes | int


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


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_MAP_TAGS = range(0x80, 0x90)
_LARGE_MAPS = (0xDE, 0xDF)


@attrs.define
class CacheNews:
    """What has changed in a cache."""

    is_cleared: bool = False
    """Everything known before is void."""
    stored: list[bytes] = attrs.field(factory=list)
    removed: list[bytes] = attrs.field(factory=list)
    """None of them in `stored`."""
    block_size: int | None = None
    num_blocks: int = 0
    """Known now."""


def chain_root(block_size: int) -> bytes:
    """Return the key from which the chains of other servers' blocks start."""
    return hashlib.sha256(b"quipu-upstream-1:%d" % block_size).digest()


class CacheFollower:
    """Follows one publisher."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._keys: dict[Hash, bytes] = {}
        self._last: int | None = None
        self._block_size: int | None = None

    def take(self, sequence: bytes, payload: bytes) -> CacheNews:
        """Apply one batch. Raises ValueError for one that cannot be read."""
        if len(sequence) != SEQUENCE_BYTES:
            raise ValueError("no sequence number")
        news = CacheNews()
        number = int.from_bytes(sequence, "big")
        if self._last is not None and number != self._last + 1:
            self._clear(news)
        self._last = number
        try:
            for raw in _batches.decode(payload).events:
                self._apply(raw, news)
        except (msgspec.DecodeError, OverflowError, RecursionError):
            self._clear(news)
            raise ValueError("no batch of KV events") from None
        news.block_size, news.num_blocks = self._block_size, len(self._keys)
        return news

    def _apply(self, raw: Any, news: CacheNews) -> None:
        data = bytes(raw)
        first = data[0] if data else 0
        event = (_maps if first in _MAP_TAGS or first in _LARGE_MAPS else _arrays).decode(data)
        match event:
            case _Stored():
                self._store(event, news)
            case _Removed():
                if event.group_idx in (None, GROUP) and event.medium in (None, MEDIUM_DEVICE):
                    self._remove(event, news)
            case _:
                self._clear(news)

    def _store(self, event: _Stored, news: CacheNews) -> None:
        size, hashes = event.block_size, event.block_hashes
        has_adapter = event.lora_id is not None or event.lora_name is not None
        if has_adapter or event.group_idx not in (None, GROUP) or event.medium not in (None, MEDIUM_DEVICE):
            return
        if not 0 < size <= MAX_BLOCK_SIZE or len(event.token_ids) != size * len(hashes):
            raise OverflowError
        if size != self._block_size:
            self._clear(news)
            self._block_size = size
        parent = chain_root(size) if event.parent_block_hash is None else self._keys.get(event.parent_block_hash)
        if parent is None:
            return  # stored before we listened
        if len(self._keys) + len(hashes) > self._max_blocks:
            self._clear(news)
            return
        keys = chain_keys(parent, event.token_ids, size)
        for name, key in zip(hashes, keys, strict=True):
            self._keys[name] = key
        news.stored += keys

    def _remove(self, event: _Removed, news: CacheNews) -> None:
        gone = [key for name in event.block_hashes if (key := self._keys.pop(name, None)) is not None]
        news.removed += gone
        if gone and news.stored:
            without = set(gone)
            news.stored = [key for key in news.stored if key not in without]

    def _clear(self, news: CacheNews) -> None:
        self._keys.clear()
        news.is_cleared = True
        news.stored, news.removed = [], []
