"""Copies from and to the blocks of the CPU backend's cache, from any thread, and the first touch of its memory.

Used by `cpu_backend.py`.

What must always hold: nobody touches memory while a block is written, since touching writes back what it has read; one
copy waits for no other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from ..kv_cache import KVCache
from .first_touch import FirstTouch


class BlockMoves:
    def __init__(self, library: ctypes.CDLL, cache: KVCache, first_touch: FirstTouch) -> None:
        self._library = library
        self._cache = cache
        self._first_touch = first_touch
        self._touching = Lock()
        self._num_writing = 0

    def read(self, blocks: Sequence[int], to: memoryview) -> None:
        self._cache.read_blocks(blocks, to)

    def write(self, blocks: Sequence[int], source: memoryview) -> None:
        with self._writing():
            self._cache.write_blocks(blocks, source)

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        with self._writing():
            self._cache.copy_from(cache, sources, targets, self._library.quipu_copy_rows)

    def touch_piece(self) -> bool:
        """Touch a piece of the cache. Return whether there may be more to touch, and nobody writes."""
        with self._touching:
            return not self._num_writing and self._first_touch.touch_piece()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._touching:
            self._num_writing += 1
        try:
            yield
        finally:
            with self._touching:
                self._num_writing -= 1
