"""Chooses the block pool: the one in C where it is built, otherwise the reference in Python, which behaves the same."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ...shared.native import IS_COMPILED
from .block_pool import BlockPool
from .pool_state import PoolState

if TYPE_CHECKING or IS_COMPILED:
    from ...shared.native import _native as native

    class CompiledPool(native.BlockPool):
        """The pool in C. Keys must be 32 bytes long."""

        __slots__ = ()

        def __new__(cls, num_blocks: int) -> CompiledPool:
            """Make a pool as `BlockPool` does. The seed of its index is secret, so that clients cannot choose colliding
            keys."""
            return super().__new__(cls, num_blocks, secrets.randbits(64))

        def state(self) -> PoolState:
            return PoolState(*self.parts())

    Pool = BlockPool | CompiledPool
else:
    Pool = BlockPool


def make_pool(num_blocks: int) -> Pool:
    """Make a pool of `num_blocks` physical blocks, including the null block. Raises ValueError below 2."""
    return CompiledPool(num_blocks) if IS_COMPILED else BlockPool(num_blocks)
