"""Which engines hold the blocks of a chain, for the prefix tree that the web layer shows.

Reads what the router knows (`route_store.py`), which may lag behind the engines by the reports on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

from .route_store import RouteStore


def held_blocks(store: RouteStore, keys: Sequence[bytes]) -> dict[int, int]:
    """Return, for each engine that holds the first of these blocks, how many of them it holds from there on.

    Takes a time in proportion to the engines, not to the blocks.
    """
    found: dict[int, int] = {}
    for match in store.routing.index.match(keys):
        for slot, engine in store.by_slot.items():
            if match.slots >> slot & 1:
                found[engine.engine_id] = max(match.num_blocks, found.get(engine.engine_id, 0))
    return found
