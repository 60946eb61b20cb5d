"""Turns for work that grows with a request, or with the number of requests, so that the event loop is never held long.

A large response is encoded in slices (`answer.py`, `http/sse.py`), a large body is read in slices (`json_body.py`,
`pace.py`). A checkpoint between slices lets other tasks run, but fifty responses would still run fifty slices in each
iteration of the loop. So they take turns: one slice of the whole process runs in each iteration. In the same way one
request is started in each iteration (`http/http11.py`): a thousand at once would make it so long that streams stall.

What must always hold: a turn takes about SLICE_S, whatever the work; nobody waits for anything during its turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio

SLICE_S = 0.002
"""How long one turn may hold the loop; a piece that was begun before is completed."""

_SLICES: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("quipu.web.http.turns.slices")
_STARTS: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("quipu.web.http.turns.starts")


def turn() -> trio.Lock:
    """Return the lock to hold during a slice: `async with turn():`. First come, first served; always a checkpoint."""
    return _lock_of_run(_SLICES)


def start_turn() -> trio.Lock:
    """Return the lock to acquire and release before a request is started. First come, first served."""
    return _lock_of_run(_STARTS)


def _lock_of_run(variable: trio.lowlevel.RunVar[trio.Lock]) -> trio.Lock:
    try:
        return variable.get()
    except LookupError:
        lock = trio.Lock()
        variable.set(lock)
        return lock


def take_slice(pieces: Iterator[bytes], max_bytes: int) -> bytes:
    """Return as many pieces as fit into a turn, joined: `max_bytes` or a little more. Empty at the end."""
    taken: list[bytes] = []
    num_bytes = 0
    end = time.perf_counter() + SLICE_S
    for piece in pieces:
        taken.append(piece)
        num_bytes += len(piece)
        if num_bytes >= max_bytes or time.perf_counter() >= end:
            break
    return b"".join(taken)
