"""Which engines hold the blocks of a chain, and in which tier, for the prefix tree that the web layer shows.

Reads what the router knows (`route_store.py`), which may lag behind the engines by the reports on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cache_insight.cache_figures import HeldBlocks
from .route_store import RouteStore


def held_blocks(store: RouteStore, keys: Sequence[bytes]) -> dict[int, HeldBlocks]:
    """Return, for each engine that holds the first of these blocks, how many of them it holds from there on.

    Takes a time in proportion to the engines, not to the blocks.
    """
    routing = store.routing
    found: dict[int, tuple[int, int]] = {}
    for match in routing.index.match(keys):
        for slot, engine in store.by_slot.items():
            if match.slots >> slot & 1:
                found[engine.engine_id] = max((match.num_blocks, slot), found.get(engine.engine_id, (0, slot)))
    return {
        engine_id: HeldBlocks(num_blocks, num_blocks - routing.lowered.num_on_device(slot, keys[:num_blocks]))
        for engine_id, (num_blocks, slot) in found.items()
    }
