"""What a prefix cache must find in a trace, said twice without quipu's code: by set arithmetic, and by an LRU list.

The list is the naive one: ids of cached blocks that nobody holds, least recently released first. One request at a
time, so everything that is cached is in it. A request

    finds     the longest run of its ids, from the first on, that is in the list, never its whole prompt
    takes     blocks for the rest of its prompt, blank ones first, then the front of the list
    enters    the full blocks of its prompt that are in nobody's hands and not in the list
    takes     blocks for its outputs, all but the last of which have a place in the cache
    releases  what it found and entered, the last block first, to the end of the list; the rest turns blank
"""

from __future__ import annotations

from tests.bench.traces import Row


def hits_without_limit(rows: list[Row], block: int) -> int:
    """Blocks found where nothing is ever evicted."""
    seen: set[int] = set()
    hits = 0
    for row in rows:
        for hash_id in row.hash_ids[: (row.input_length - 1) // block]:
            if hash_id not in seen:
                break
            hits += 1
        seen.update(row.hash_ids[: row.input_length // block])
    return hits


def hits_with_lru(rows: list[Row], block: int, capacity: int) -> tuple[int, int]:
    """Blocks found, and requests that can never fit, with `capacity` blocks."""
    cached: dict[int, None] = {}
    hits = rejected = 0
    for row in rows:
        if row.input_length + row.output_length > capacity * block:
            rejected += 1
            continue
        full = row.hash_ids[: row.input_length // block]
        found: list[int] = []
        for hash_id in full[: (row.input_length - 1) // block]:
            if hash_id not in cached:
                break
            found.append(hash_id)
        hits += len(found)
        for hash_id in found:
            del cached[hash_id]
        num_held = -(-row.input_length // block)
        evict_to_fit(cached, capacity - num_held)
        entered = [hash_id for hash_id in full[len(found) :] if hash_id not in cached]
        num_held = -(-(row.input_length + row.output_length - 1) // block)
        evict_to_fit(cached, capacity - num_held)
        for hash_id in reversed(found + entered):
            cached[hash_id] = None
    return hits, rejected


def evict_to_fit(cached: dict[int, None], room: int) -> None:
    while len(cached) > room:
        del cached[next(iter(cached))]
