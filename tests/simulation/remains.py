"""Finds what a server still keeps of sequences: any number of one, in any container or attribute of an actor's state.

Sequences of a simulation are numbered from `FIRST_SEQUENCE` on, so that a number of one is nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

FIRST_SEQUENCE = 100_000
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
KEPT = {
    "released_ids": "what the executor is told with the next pass",
    "_patience": "how long candidates may wait, until the next step has others",
    "_evictions": "who has evicted a block, by which misses are explained",
    "_misses": "the same",
    "explanations": "of requests that have ended",
}
"""Attributes that have such numbers for longer, and why: bounded stores, and what waits for the next pass."""
OURS = "quipu."
"""Only into objects of such modules is looked."""


def remains_of(roots: Mapping[str, object], first: int, end: int) -> Counter[str]:
    """Return how many numbers from `first` to before `end` there are in these objects, by where they are."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = [(name, value) for name, value in roots.items()]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int):
            found[path] += first <= value < end
        elif (isinstance(value, CONTAINERS) or _is_ours(value)) and id(value) not in seen:
            seen.add(id(value))
            waiting += _within(path, value)
    return +found


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith(OURS)


def _within(path: str, value: Any) -> Iterator[tuple[str, Any]]:
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
            if name not in KEPT and not name.startswith("__") and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)
