"""The pool of blocks that the engine runs with: in C where that is there, else in Python.

Both do the same; `block_pool.py` is the one to read. The reservation and the pins use either.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ..shared.native import IS_COMPILED
from .block_pool import BlockPool
from .pool_checks import PoolChecks, PoolState

if TYPE_CHECKING or IS_COMPILED:
    from ..shared.native import _native as native

    class CompiledPool(native.BlockPool, PoolChecks):
        """Keys have 32 bytes."""

        __slots__ = ()

        def __new__(cls, num_blocks: int) -> CompiledPool:
            """As `BlockPool`. Nobody outside knows the seed of its index, so nobody can choose keys that collide."""
            return super().__new__(cls, num_blocks, secrets.randbits(64))

        def state(self) -> PoolState:
            return PoolState(*self.parts())

    Pool = BlockPool | CompiledPool
else:
    Pool = BlockPool


def make_pool(num_blocks: int) -> Pool:
    """A pool of `num_blocks` physical blocks, the null block included. Raises ValueError below 2."""
    return CompiledPool(num_blocks) if IS_COMPILED else BlockPool(num_blocks)
