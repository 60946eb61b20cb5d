"""Taking turns at work that grows with a request, so that the event loop is never held for long.

A large answer is encoded in slices (`answer.py`, `sse.py`). A checkpoint between two of them lets everybody else run,
but fifty answers would have fifty slices done in each round of the loop. So they take turns: of all slices in a process
one is done in each round.

What must always hold: a turn takes about SLICE_S, whatever is behind it; nobody waits for anything while it is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio

SLICE_S = 0.002
"""How long one turn may hold the loop; the piece that is begun before is still made."""

_LOCK: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("quipu.web.turns")


def turn() -> trio.Lock:
    """What to hold during a slice: `async with turn():`. First come, first served; a checkpoint in any case."""
    try:
        return _LOCK.get()
    except LookupError:
        lock = trio.Lock()
        _LOCK.set(lock)
        return lock


def take_slice(pieces: Iterator[bytes], max_bytes: int) -> bytes:
    """As many of the next pieces as a turn has time for, of `max_bytes` or a little more; empty at the end."""
    taken: list[bytes] = []
    num_bytes = 0
    end = time.perf_counter() + SLICE_S
    for piece in pieces:
        taken.append(piece)
        num_bytes += len(piece)
        if num_bytes >= max_bytes or time.perf_counter() >= end:
            break
    return b"".join(taken)
