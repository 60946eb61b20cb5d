"""The pools that there are here: in Python, and in C where this installation has that."""

from __future__ import annotations

from quipu.actors.core.block_pool import BlockPool
from quipu.actors.core.compiled import IS_COMPILED
from quipu.actors.core.pools import make_pool

POOLS = [BlockPool, make_pool] if IS_COMPILED else [BlockPool]
