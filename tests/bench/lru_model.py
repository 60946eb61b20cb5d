"""Two models, independent of quipu's code, of what a prefix cache finds in a trace: set arithmetic and an LRU list.

The list is the naive one: ids of cached blocks that are not in use, least recently released first. There is one request
at a time, so everything cached is in it. A request

    finds     the longest prefix of its ids that is in the list, never its whole prompt
    takes     blocks for the rest of its prompt, unused ones first, then from the front of the list
    enters    the full blocks of its prompt that are not in use and not in the list
    takes     blocks for its outputs, all but the last of which are written to the cache
    releases  what it found and entered, the last block first, to the end of the list; the rest becomes unused
"""

from __future__ import annotations

from tests.bench.traces import Row


def hits_without_limit(rows: list[Row], block: int) -> int:
    """Return the number of blocks found if nothing is ever evicted."""
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
    """Return the blocks found with `capacity` blocks, and the number of requests that can never fit."""
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
