"""Copies of blocks between an engine's device and another engine: by buffers that both share, or, where both caches lie
in memory that both can map, from cache to cache.

Called by `engine/peers/`; what copies, from threads.

    by buffers   server: tags before ─▶ copy ─▶ the same tags after?      client: copy ─▶ tags
    at once      server: tags before ─▶ (client: copy) ─▶ the same tags after? ─▶ client: tags

What must always hold: a block counts as copied only if the executor's tag was the same before and after; a block on the
device is tagged only after all its bytes have been written. No checksum is made: a buffer holds blocks for less than a
step, in memory that is as good as the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, runtime_checkable

import attrs

from .block_carrier import BlockMemory, BlockTag, TagTable

RUN_BYTES: Final = 8 << 20
"""Of blocks that are copied together: enough that the copy takes longer than what surrounds it, and little enough to
stay in a processor's last cache until it is copied again."""
MOST_TOGETHER: Final = 256
SHARED_RUN_BYTES: Final = 32 << 20
"""Likewise, where they are copied once: no cache helps."""


class CopyFailed(Exception):
    """A copy raised; the message says what. The next one may succeed."""


@runtime_checkable
class SharesBlocks(Protocol):
    """The part of a backend that copies blocks from the cache of another one. Not all have it."""

    @property
    def cache_descriptor(self) -> int | None: ...
    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None: ...


@attrs.frozen
class PeerCopies:
    """The device's side of a transfer."""

    _memory: BlockMemory
    _tags: TagTable
    block_size: int
    block_bytes: int
    numerics: str
    """Digest of all that the bits of a block depend on."""
    _is_fatal: Callable[[BaseException], bool] = lambda error: False
    """Whether an error means that no later copy can succeed in this process: such an error is raised as it is."""

    @property
    def cache_descriptor(self) -> int | None:
        """The memory of the whole cache, for peers to map; None if they cannot."""
        return self._memory.cache_descriptor if isinstance(self._memory, SharesBlocks) else None

    @property
    def most_shared(self) -> int:
        """Blocks that are copied at a time from cache to cache."""
        return max(1, min(MOST_TOGETHER, SHARED_RUN_BYTES // self.block_bytes))

    @property
    def most_together(self) -> int:
        """Blocks of one buffer."""
        return max(1, min(MOST_TOGETHER, RUN_BYTES // self.block_bytes))

    @property
    def buffer_bytes(self) -> int:
        return self.most_together * self.block_bytes

    def copy_out(self, blocks: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> int:
        """Copy blocks to a buffer. Return how many leading ones have the contents that the keys name, and are full.

        Raises CopyFailed.
        """
        tags = self.tags_of(blocks, keys)
        with self._errors():
            self._memory.read_blocks(blocks, memory[: len(blocks) * self.block_bytes])
        return self.num_unchanged(blocks, tags)

    def tags_of(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[BlockTag]:
        """Return the tags of the leading blocks that have the contents that the keys name, and are full."""
        tags: list[BlockTag] = []
        for block, key in zip(blocks, keys, strict=True):
            tag = self._tags.tag_of(block)
            if tag is None or tag.key != key or tag.num_filled != self.block_size:
                break
            tags.append(tag)
        return tags

    def num_unchanged(self, blocks: Sequence[int], tags: Sequence[BlockTag]) -> int:
        """Return how many leading blocks still have these tags."""
        for at, tag in enumerate(tags):
            if self._tags.tag_of(blocks[at]) is not tag:
                return at
        return len(tags)

    def forget(self, blocks: Sequence[int]) -> None:
        """Note that blocks are about to be overwritten."""
        self._tags.forget(blocks)

    def copy_in(self, blocks: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> None:
        """Copy a buffer to blocks, and tag them. Raises CopyFailed."""
        with self._errors():
            self._memory.write_blocks(blocks, memory[: len(blocks) * self.block_bytes])
        self._tags.set_loaded(blocks, keys)

    def copy_across(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of a peer's cache to blocks. They are to be tagged once the peer confirms them.

        Raises CopyFailed.
        """
        with self._errors():
            if not isinstance(self._memory, SharesBlocks):
                raise TypeError("this backend copies nothing from another's cache")
            self._memory.copy_from(cache, sources, targets)

    def confirm(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Tag blocks whose contents a peer has confirmed."""
        self._tags.set_loaded(blocks, keys)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._is_fatal(error):
                raise
            raise CopyFailed(f"{type(error).__name__}: {error}") from error
