"""The available pools: the one in Python, and the one in C if it was built."""

from __future__ import annotations

from quipu.actors.engine.block_manager.block_pool import BlockPool
from quipu.actors.engine.block_manager.pools import make_pool
from quipu.actors.shared.native import IS_COMPILED

POOLS = [BlockPool, make_pool] if IS_COMPILED else [BlockPool]
