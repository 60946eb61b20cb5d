"""Threads for texts: some for short requests, some for long ones, each with a queue that is fair among tenants.

Used by the tokenizer. A request waits for its turn in one lane and keeps it from text to text, unless another tenant
waits. Where the server runs, a thread for long ones has a process encode (`encode_processes.py`), which is killed when
nobody wants the result any more.

What must always hold: a short request never waits for a long one; no tenant holds more than half of the threads for
long ones; what waits is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

from ..tokenizer.encoder import TextEncoder
from .encode_processes import SPARE_S, EncodeProcesses, Loan
from .fair_queue import FairQueue

SHORT_BYTES = 64 << 10
"""A request whose texts are shorter than that together has threads of its own."""
MOST_THREADS = 4
"""Of either lane."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lane:
    """A few threads, and who waits for them."""

    def __init__(
        self,
        num_threads: int,
        most_of_one: int,
        max_waiting: int,
        max_waiting_bytes: int,
        encoder: TextEncoder,
        processes: EncodeProcesses | None = None,
    ) -> None:
        """`most_of_one`: threads that one tenant may hold. Without `processes`, `encoder` encodes in the threads."""
        self.encoder = encoder
        self.processes = processes
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

    async def encode(self, call: Callable[[TextEncoder], T]) -> T:
        """Run `call` in a thread, with an encoder. Where that has a process, both end when this is cancelled.

        Raises CannotStart, and what `call` does.
        """
        processes = self._lane.processes
        if processes is None:
            return await self.run(call, self._lane.encoder)
        await self._granted.wait()
        loan = Loan()
        try:
            return await trio.to_thread.run_sync(
                processes.run, call, loan, limiter=self._lane.threads, abandon_on_cancel=True
            )
        except trio.Cancelled:
            loan.stop()
            raise

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

    def __init__(self, encoder: TextEncoder, *, is_short: bool = False) -> None:
        """`is_short`: the whole request is, and needs no pause."""
        self._encoder = encoder
        self._is_short = is_short

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return call(*args)

    async def encode(self, call: Callable[[TextEncoder], T]) -> T:
        return call(self._encoder)

    async def pause(self) -> None:
        if not self._is_short:
            await trio.lowlevel.checkpoint()

    def leave(self) -> None:
        pass


Place = Turn | Inline


class Lanes:
    """The two lanes of one tokenizer."""

    def __init__(
        self,
        max_waiting: int,
        max_waiting_bytes: int,
        encoder: TextEncoder,
        processes: EncodeProcesses | None = None,
    ) -> None:
        """`max_waiting`, `max_waiting_bytes`: requests that may wait in each lane, and bytes of their texts.

        `encoder` encodes in this process; with `processes`, long texts are encoded there.
        """
        num_cpus = len(os.sched_getaffinity(0))
        num_threads = min(MOST_THREADS, max(2, num_cpus))
        self._processes = processes
        self.short = Lane(num_threads, num_threads, max_waiting, max_waiting_bytes, encoder)
        self.long = Lane(num_threads, num_threads // 2, max_waiting, max_waiting_bytes, encoder, processes)

    async def run(self) -> None:
        """Keep processes until cancelled."""
        if self._processes is None:
            return
        try:
            await trio.to_thread.run_sync(self._processes.warm_up, abandon_on_cancel=True)
            while True:
                await trio.sleep(SPARE_S)
                await trio.to_thread.run_sync(self._processes.dismiss_spare)
        finally:
            self._processes.close()

    def enter(self, tenant: str, num_bytes: int) -> Turn:
        """Take a place for texts of so many bytes together. Raises Crowded."""
        return (self.short if num_bytes < SHORT_BYTES else self.long).enter(tenant, num_bytes)
