"""Threads that encode texts: some for short requests, some for long ones, each with a queue fair among tenants.

Used by `pooled_encoder.py`. A request waits for its turn in one lane and keeps it from text to text, unless another
tenant waits. In a real server a thread of the long lane has a process encode (`encode_processes.py`), which is killed
when its client leaves.

What must always hold: a short request never waits for a long one; no tenant holds more than half of the threads for
long ones; the queues are bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar, TypeVarTuple

import attrs
import trio

from ..shared.fair_queue import FairQueue
from ..threads import outlive_shortages, run_in_thread
from ..tokenizer.encoder import TextEncoder
from ..tokenizer.prompt_sizes import SHORT_BYTES
from .encode_processes import IDLE_S, EncodeProcesses, Lease

MAX_THREADS = 4
"""Per lane."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Lane:
    def __init__(
        self,
        num_threads: int,
        max_per_tenant: int,
        max_waiting: int,
        max_waiting_bytes: int,
        encoder: TextEncoder,
        processes: EncodeProcesses | None = None,
    ) -> None:
        """`max_per_tenant`: threads one tenant may hold. Without `processes`, the threads encode with `encoder`."""
        self.encoder = encoder
        self.processes = processes
        self._num_free = num_threads
        self.max_per_tenant = max_per_tenant
        self.queue: FairQueue[LaneSlot] = FairQueue(max_waiting, max_waiting_bytes)
        self.threads = trio.CapacityLimiter(num_threads)

    def enter(self, tenant: str, num_bytes: int) -> LaneSlot:
        """Take a place in the queue, which must be left later. Raises QueueFull."""
        slot = LaneSlot(self, tenant, num_bytes)
        self.queue_up(slot)
        return slot

    def queue_up(self, slot: LaneSlot) -> None:
        """Put a slot at the end of the queue. Raises QueueFull."""
        self.queue.put(slot.tenant, slot, slot.num_bytes)
        self._grant()

    def others_wait(self, tenant: str) -> bool:
        return self.queue.others_wait(tenant, self.max_per_tenant)

    def release_thread(self) -> None:
        self._num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (slot := self.queue.take(self.max_per_tenant)) is not None:
            self._num_free -= 1
            slot.grant()


@attrs.define(eq=False)
class LaneSlot:
    """One request's place in a lane (an `EncodingSlot`)."""

    _lane: Lane
    tenant: str
    num_bytes: int
    _granted: trio.Event = attrs.field(factory=trio.Event)
    _is_resting: bool = False
    _has_left: bool = False

    def grant(self) -> None:
        self._granted.set()

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        await self._wait_for_turn()
        return await run_in_thread(call, *args, limiter=self._lane.threads)

    async def encode(self, call: Callable[[TextEncoder], T]) -> T:
        processes = self._lane.processes
        if processes is None:
            return await self.run(call, self._lane.encoder)
        await self._wait_for_turn()
        lease = Lease()
        try:
            return await run_in_thread(processes.run, call, lease, limiter=self._lane.threads, abandon_on_cancel=True)
        except trio.Cancelled:
            lease.cancel()
            raise

    async def pause(self) -> None:
        if self._granted.is_set() and self._lane.others_wait(self.tenant):
            self._granted = trio.Event()
            self._lane.queue.put_back(self.tenant, self)
            self._lane.release_thread()
        await trio.lowlevel.checkpoint()

    def rest(self) -> None:
        if not self._has_left and not self._is_resting:
            self._is_resting = True
            self._give_up()
            self._granted = trio.Event()

    def leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        if not self._is_resting:
            self._give_up()

    async def _wait_for_turn(self) -> None:
        if self._is_resting:
            self._lane.queue_up(self)
            self._is_resting = False
        await self._granted.wait()

    def _give_up(self) -> None:
        if self._granted.is_set():
            self._lane.queue.done(self.tenant)
            self._lane.release_thread()
        else:
            self._lane.queue.drop(self.tenant, self)


@attrs.frozen(eq=False)
class InlineSlot:
    """Encode on the event loop texts so short that a thread costs more than the work (an `EncodingSlot`)."""

    _encoder: TextEncoder
    _is_whole_request: bool = False
    """The whole request is short and needs no pause."""

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return call(*args)

    async def encode(self, call: Callable[[TextEncoder], T]) -> T:
        return call(self._encoder)

    async def pause(self) -> None:
        if not self._is_whole_request:
            await trio.lowlevel.checkpoint()

    def rest(self) -> None:
        pass

    def leave(self) -> None:
        pass


class Lanes:
    def __init__(
        self,
        max_waiting: int,
        max_waiting_bytes: int,
        encoder: TextEncoder,
        processes: EncodeProcesses | None = None,
    ) -> None:
        """`max_waiting` requests and `max_waiting_bytes` of their texts may wait in each lane.

        `encoder` encodes in this process; with `processes`, long texts are encoded there.
        """
        num_cpus = len(os.sched_getaffinity(0))
        num_threads = min(MAX_THREADS, max(2, num_cpus))
        self._processes = processes
        self.short = Lane(num_threads, num_threads, max_waiting, max_waiting_bytes, encoder)
        self.long = Lane(num_threads, num_threads // 2, max_waiting, max_waiting_bytes, encoder, processes)

    async def run(self) -> None:
        if self._processes is None:
            return
        try:
            await outlive_shortages(partial(self._keep_running, self._processes), "encode processes")
        finally:
            self._processes.close()

    async def _keep_running(self, processes: EncodeProcesses) -> None:
        await run_in_thread(processes.warm_up, abandon_on_cancel=True)
        while True:
            await trio.sleep(IDLE_S)
            await run_in_thread(processes.end_idle)

    def enter(self, tenant: str, num_bytes: int) -> LaneSlot:
        """Enter a lane with texts of `num_bytes` in total. Raises QueueFull."""
        return (self.short if num_bytes < SHORT_BYTES else self.long).enter(tenant, num_bytes)
