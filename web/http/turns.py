"""Turns for work that grows with a request, or with the number of requests, so that the event loop is never held long.

Large responses and bodies are made and read in slices, with a checkpoint in between. Fifty of them would still run
fifty slices in each iteration of the loop, so they take turns: one slice of the whole process runs in each iteration.
In the same way one request is started in each iteration (`http11.py`). Where one client could fill the queue with its
connections, the turns go round among tenants (`FairTurns`).

What must always hold: a slice takes about SLICE_S, whatever the work; nobody waits for anything during it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager

import attrs
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


class TooManyWaiting(Exception):
    """A party has reached its limit of queued tasks; try again later."""


@attrs.define(eq=False)
class _Party:
    turns: trio.Semaphore
    num_tasks: int = 0
    """Tasks that wait for a turn or hold one."""


class FairTurns:
    """Turns of which `num_at_once` are taken at once, and which go round among the parties (tenants) that wait.

    A task first takes one of its party's turns, so that at most `num_at_once` tasks of a party are in the common queue.
    """

    def __init__(self, num_at_once: int = 1, *, max_waiting: int | None = None) -> None:
        """`max_waiting` tasks of a party may wait; None: any number."""
        self._num_at_once = num_at_once
        self._max_tasks = None if max_waiting is None else num_at_once + max_waiting
        self._parties: dict[Hashable, _Party] = {}
        self._turns = trio.Semaphore(num_at_once)

    @asynccontextmanager
    async def turn(self, party: Hashable) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while the block runs; always a checkpoint. Raises TooManyWaiting at once."""
        its = self._parties.get(party)
        if its is None:
            its = self._parties[party] = _Party(trio.Semaphore(self._num_at_once))
        if its.num_tasks == self._max_tasks:
            raise TooManyWaiting
        its.num_tasks += 1
        try:
            async with its.turns, self._turns:
                yield
        finally:
            its.num_tasks -= 1
            if not its.num_tasks:
                del self._parties[party]


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
