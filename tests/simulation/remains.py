"""Finds what a server still keeps of sequences and blocks: any number or key of one, wherever in an actor's state.

Sequences of a simulation are numbered from `FIRST_SEQUENCE` on, so that a number of one is nothing else. Keys of blocks
are as long as nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FIRST_SEQUENCE = 100_000
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
KEPT = {
    "released_ids": "what the executor is told with the next pass",
    "_patience": "how long candidates may wait, until the next step has others",
    "_evictions": "who has evicted a block, by which misses are explained",
    "_misses": "the same",
    "explanations": "of requests that have ended",
    "observers": "the same as the two before, where the pool is the one in Python",
}
"""Attributes that have such numbers for longer, and why: bounded stores, and what waits for the next pass."""
KEY_BYTES = 32
KEPT_KEYS = {
    **KEPT,
    "index": "what a tier knows of its own places",
    "queue": "what waits to be stored, and is forgotten when it is its turn",
    "pins": "prefixes that are to be kept for a time, wherever they come to be",
    "_missed": "what an object store did not have",
    "_held": "what it is believed to have",
    "_news": "what the next report says of that",
    "_key_changes": "what the next report says of the device",
    "_pending": "what the last pass was to write, until the next is planned",
}
"""Attributes that have keys of blocks that are nowhere, and why."""
OURS = "quipu."
"""Only into objects of such modules is looked."""


def remains_of(roots: Mapping[str, object], first: int, end: int) -> Counter[str]:
    """Return how many numbers from `first` to before `end` there are in these objects, by where they are."""
    values = _walk(roots, KEPT)
    return Counter(path for path, value in values if isinstance(value, int) and first <= value < end)


def stale_keys_of(roots: Mapping[str, object], is_there: Callable[[bytes], bool]) -> Counter[str]:
    """Return how many keys there are of blocks that are nowhere, by where they are."""
    values = _walk(roots, KEPT_KEYS)
    keys = ((path, value) for path, value in values if isinstance(value, bytes) and len(value) == KEY_BYTES)
    return Counter(path for path, key in keys if not is_there(key))


def _walk(roots: Mapping[str, object], kept: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the numbers and strings within these objects, and where they are, but for attributes in `kept`."""
    seen: set[int] = set()
    waiting = list(roots.items())
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int | bytes):
            yield path, value
        elif (isinstance(value, CONTAINERS) or _is_ours(value)) and id(value) not in seen:
            seen.add(id(value))
            waiting += _within(path, value, kept)


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith(OURS)


def _within(path: str, value: Any, kept: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, held in value.items():
            yield f"{path}[]", key
            yield f"{path}[]", held
    elif isinstance(value, CONTAINERS):
        for held in value:
            yield f"{path}[]", held
    else:
        names = set(getattr(value, "__dict__", ()))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            names.update((slots,) if isinstance(slots, str) else slots)
        for name in names:
            if name not in kept and not name.startswith("__") and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)
