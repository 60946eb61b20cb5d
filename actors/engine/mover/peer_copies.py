"""Copies of blocks between an engine's device and the buffers that it shares with another engine.

Called by `peer_server.py` and `peer_client.py`, from threads.

What must always hold: a block counts as copied only if the executor's tag was the same before and after; a block on the
device is tagged only after all its bytes have been written. No checksum is made: a buffer holds blocks for less than a
step, in memory that is as good as the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs

from .block_carrier import BlockMemory, TagTable

RUN_BYTES: Final = 8 << 20
"""Of blocks that are copied together: enough that the copy takes longer than what surrounds it, and little enough to
stay in a processor's last cache until it is copied again."""
MOST_TOGETHER: Final = 256


class CopyFailed(Exception):
    """A copy raised; the message says what. The next one may succeed."""


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
        tags = [self._tags.tag_of(block) for block in blocks]
        with self._errors():
            self._memory.read_blocks(blocks, memory[: len(blocks) * self.block_bytes])
        for at, (block, tag, key) in enumerate(zip(blocks, tags, keys, strict=True)):
            is_full = tag is not None and tag.key == key and tag.num_filled == self.block_size
            if not is_full or self._tags.tag_of(block) is not tag:
                return at
        return len(blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """Note that blocks are about to be overwritten."""
        self._tags.forget(blocks)

    def copy_in(self, blocks: Sequence[int], keys: Sequence[bytes], memory: memoryview) -> None:
        """Copy a buffer to blocks, and tag them. Raises CopyFailed."""
        with self._errors():
            self._memory.write_blocks(blocks, memory[: len(blocks) * self.block_bytes])
        self._tags.set_loaded(blocks, keys)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._is_fatal(error):
                raise
            raise CopyFailed(f"{type(error).__name__}: {error}") from error
