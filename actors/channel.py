"""Typed channel ends in memory: between the actors of one process.

A `Channel` is bounded, first in, first out. `send` waits for one of `capacity` slots; `post` always has room, for
senders that must never wait (a scope that is being left, one answer per sequence) and bound by themselves how much they
post. `send_nowait` is `send` without a checkpoint, if there is a slot: what several senders have at once is then
received at once. `deliver_now` needs no wake-up: a waiting receiver may handle an item in its sender's task.

Between the web process and the engine process there are frames (`frames.py`).

What must always hold: items are received once, in order; an error of a receiver's handler is raised in the receiver's
task, never in the sender's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import trio

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sender(Protocol[T_contra]):
    async def send(self, item: T_contra, /) -> None:
        """Wait for a slot and add an item."""


class EagerSender(Sender[T_contra], Protocol[T_contra]):
    def deliver_now(self, item: T_contra, /) -> bool:
        """Have the receiver handle an item now, if it waits and is willing to; return whether it was."""

    def send_nowait(self, item: T_contra, /) -> bool:
        """Add an item if there is a slot, and return whether there was."""


class Poster(Protocol[T_contra]):
    def post(self, item: T_contra, /) -> None:
        """Add an item; there is always room."""


class Receiver(Protocol[T]):
    async def receive_all(self, take_now: Callable[[T], bool] | None = None) -> list[T]:
        """Wait until there are items and take all of them, in order. `take_now`: see `Channel.receive_all`."""


class Channel(Generic[T]):
    """An in-memory channel with one receiver and any number of senders."""

    def __init__(self, capacity: int) -> None:
        """`capacity` limits the items that wait after `send`; items added by `post` do not count."""
        if capacity < 1:
            raise ValueError(f"the capacity of a channel must be at least 1, not {capacity}")
        self._items: list[T] = []
        self._num_free_slots = capacity
        self._num_queued_slots = 0
        self._senders = trio.lowlevel.ParkingLot()
        self._receiver: trio.lowlevel.Task | None = None
        self._take_now: Callable[[T], bool] | None = None
        self._error: Exception | None = None
        """What `_take_now` has raised, until the receiver's task raises it."""

    def __len__(self) -> int:
        return len(self._items)

    async def send(self, item: T, /) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._num_free_slots > 0:
            self._num_free_slots -= 1
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._senders.park()  # a freed slot is handed over
        self._num_queued_slots += 1
        self.post(item)

    def send_nowait(self, item: T, /) -> bool:
        if self._num_free_slots == 0:
            return False
        self._num_free_slots -= 1
        self._num_queued_slots += 1
        self.post(item)
        return True

    def deliver_now(self, item: T, /) -> bool:
        take_now, task = self._take_now, self._receiver
        if take_now is None or task is None:
            return False
        self._take_now = None  # what is sent to this receiver meanwhile wakes it
        try:
            is_done = take_now(item)
        except Exception as error:
            self._error = error
            self._wake_receiver()
        else:
            if not is_done:
                self._wake_receiver()
            elif self._receiver is task:
                self._take_now = take_now
        return True

    def post(self, item: T, /) -> None:
        self._items.append(item)
        self._wake_receiver()

    def post_first(self, items: Sequence[T], /) -> None:
        """Add items before all others, in order; there is always room."""
        if items:
            self._items[:0] = items
            self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._receiver is not None:
            task, self._receiver, self._take_now = self._receiver, None, None
            trio.lowlevel.reschedule(task)

    async def receive_all(self, take_now: Callable[[T], bool] | None = None) -> list[T]:
        """Wait until there are items and take all of them, in order.

        While it waits, `take_now(item)` is called in the task of a sender that delivers an item now. It returns whether
        that was all there is to do; if not, or if it raises, this call returns or raises in its own task.
        """
        if self._items:
            await trio.lowlevel.checkpoint()
        else:
            await self._wait_item(take_now)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        return self.take_nowait()

    def take_nowait(self) -> list[T]:
        """Take all items there are, which may be none."""
        items, self._items = self._items, []
        count, self._num_queued_slots = self._num_queued_slots, 0
        woken = len(self._senders.unpark(count=count)) if count and self._senders else 0
        self._num_free_slots += count - woken
        return items

    async def _wait_item(self, take_now: Callable[[T], bool] | None) -> None:
        if self._receiver is not None:
            raise trio.BusyResourceError("another task is already receiving from this channel")
        self._receiver = trio.lowlevel.current_task()
        self._take_now = take_now

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = self._take_now = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
