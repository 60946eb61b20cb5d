"""Taking turns at work that grows with a request, or with their number, so that the event loop is never held for long.

A large answer is encoded in slices (`answer.py`, `http/sse.py`), a large body is read in slices (`json_body.py`,
`pace.py`). A checkpoint between two of them lets everybody else run, but fifty answers would have fifty slices done in
each round of the loop. So they take turns: of all slices in a process one is done in each round. In the same way one
request is begun in each round (`http/http11.py`): a thousand at once would make a round so long that streams wait for
it.

What must always hold: a turn takes about SLICE_S, whatever is behind it; nobody waits for anything while it is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio

SLICE_S = 0.002
"""How long one turn may hold the loop; the piece that is begun before is still made."""

_SLICES: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("quipu.web.http.turns.slices")
_STARTS: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("quipu.web.http.turns.starts")


def turn() -> trio.Lock:
    """What to hold during a slice: `async with turn():`. First come, first served; a checkpoint in any case."""
    return _lock_of_run(_SLICES)


def start_turn() -> trio.Lock:
    """What to hold for a moment before a request is begun: likewise."""
    return _lock_of_run(_STARTS)


def _lock_of_run(variable: trio.lowlevel.RunVar[trio.Lock]) -> trio.Lock:
    try:
        return variable.get()
    except LookupError:
        lock = trio.Lock()
        variable.set(lock)
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
