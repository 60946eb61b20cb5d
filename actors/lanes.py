"""Threads for texts: some for short requests, some for long ones, each with a queue that is fair among tenants.

Used by the tokenizer. A request waits for its turn in one lane and keeps it from text to text, unless another tenant
waits. A thread cannot be stopped: a turn ends when its thread does, also where nobody wants the result any more.

What must always hold: a short request never waits for a long one; no tenant holds more than half of the threads for
long ones; what waits is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

from quipu.actors.core.turns import FairQueue

SHORT_BYTES = 64 << 10
"""A request whose texts are shorter than that together has threads of its own."""
MOST_THREADS = 4
"""Of either lane."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lane:
    """A few threads, and who waits for them."""

    def __init__(self, num_threads: int, most_of_one: int, max_waiting: int, max_waiting_bytes: int) -> None:
        """`most_of_one`: threads that one tenant may hold."""
        self._num_free = num_threads
        self.most_of_one = most_of_one
        self.queue: FairQueue[Turn] = FairQueue(max_waiting, max_waiting_bytes)
        self.threads = trio.CapacityLimiter(num_threads)

    def enter(self, tenant: str, num_bytes: int) -> Turn:
        """Take a place in the queue; the turn must be left. Raises Crowded."""
        turn = Turn(self, tenant)
        self.queue.put(tenant, turn, num_bytes)
        self._grant()
        return turn

    def others_wait(self, tenant: str) -> bool:
        return self.queue.others_wait(tenant, self.most_of_one)

    def give_back(self) -> None:
        """A thread is free."""
        self._num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (turn := self.queue.take(self.most_of_one)) is not None:
            self._num_free -= 1
            turn.grant()


class Turn:
    """One request's place in a lane."""

    def __init__(self, lane: Lane, tenant: str) -> None:
        self._lane = lane
        self._tenant = tenant
        self._granted = trio.Event()
        self._has_left = False

    def grant(self) -> None:
        self._granted.set()

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `call` in a thread, once it is this request's turn. Not cancelled once it runs."""
        await self._granted.wait()
        return await trio.to_thread.run_sync(call, *args, limiter=self._lane.threads)

    async def pause(self) -> None:
        """Between two texts: let others go first, where they wait. A checkpoint."""
        if self._granted.is_set() and self._lane.others_wait(self._tenant):
            self._granted = trio.Event()
            self._lane.queue.put_back(self._tenant, self)
            self._lane.give_back()
        await trio.lowlevel.checkpoint()

    def leave(self) -> None:
        """Give the place up, or the thread. May be called any number of times."""
        if self._has_left:
            return
        self._has_left = True
        if self._granted.is_set():
            self._lane.queue.done(self._tenant)
            self._lane.give_back()
        else:
            self._lane.queue.drop(self._tenant, self)


class Inline:
    """For texts that are so short that a thread costs more than the work."""

    def __init__(self, *, is_short: bool = False) -> None:
        """`is_short`: the whole request is, and needs no pause."""
        self._is_short = is_short

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return call(*args)

    async def pause(self) -> None:
        if not self._is_short:
            await trio.lowlevel.checkpoint()

    def leave(self) -> None:
        pass


Place = Turn | Inline


class Lanes:
    """The two lanes of one tokenizer."""

    def __init__(self, max_waiting: int, max_waiting_bytes: int) -> None:
        """Of each lane: requests that may wait in it, and bytes of their texts."""
        num_cpus = len(os.sched_getaffinity(0))
        num_threads = min(MOST_THREADS, max(2, num_cpus))
        self.short = Lane(num_threads, num_threads, max_waiting, max_waiting_bytes)
        self.long = Lane(num_threads, num_threads // 2, max_waiting, max_waiting_bytes)

    def enter(self, tenant: str, num_bytes: int) -> Turn:
        """Take a place for texts of so many bytes together. Raises Crowded."""
        return (self.short if num_bytes < SHORT_BYTES else self.long).enter(tenant, num_bytes)
