"""The queue in which one request's events wait for its handler.

The accountant and the detokenizer write, in one event loop; the request's handler reads. `put` never blocks, and any
number of items costs the reader a single wake-up. The length is bounded by what the request may produce.

With several choices, another choice may be ahead of the first one, whose engine has died before its admission was
heard. What a client is told of a prompt is the admission of its first choice, so the others' text waits for it.

What must always hold: items come out once each and, of a choice, in order, also across `attach`; no text comes out
before its prompt's numbers, unless the request ends without them; nothing comes out after the first `Closed`, final or
not.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..messages.handler import Closed, OutletEvent
from .early_text import EarlyText


class Mailbox:
    """A single-reader queue of outlet events that wakes its reader once for all waiting items."""

    __slots__ = ("_consume", "_early", "_is_answered", "_items", "_on_closed", "_task", "closed")

    def __init__(self, early: EarlyText | None = None) -> None:
        """`early` holds text back that is ahead of its prompt's numbers. None: none can be."""
        self._early = early
        self._items: list[OutletEvent] = []
        self._task: trio.lowlevel.Task | None = None
        self._consume: Callable[[list[OutletEvent]], None] | None = None
        self._on_closed: Callable[[Closed], object] | None = None
        self._is_answered = False
        """A `Closed` has been put: the reader gets nothing after it."""
        self.closed: Closed | None = None

    def put(self, event: OutletEvent, /) -> None:
        if self._early is None:
            self._put(event)
            return
        for each in self._early.let_through(event):
            self._put(each)
        if self._early.is_over:
            self._early = None

    def _put(self, event: OutletEvent) -> None:
        closed = event if isinstance(event, Closed) else None
        is_final = closed is not None and closed.is_final
        if is_final:
            self.closed = closed
        if not self._is_answered:
            self._hand_out(event)
        if closed is not None:
            self._is_answered = True
            # nothing follows: drop the reader, which would otherwise be part of a reference cycle
            self._consume = None
            if is_final and self._on_closed is not None:
                self._on_closed(closed)
                self._on_closed = None

    def _hand_out(self, event: OutletEvent) -> None:
        if self._consume is not None:
            self._consume([event])
            return
        self._items.append(event)
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def attach(self, consume: Callable[[list[OutletEvent]], None]) -> None:
        """Pass events to `consume` immediately from now on, first those that wait. It must not raise or block."""
        if not self._is_answered:
            self._consume = consume
        if self._items:
            items, self._items = self._items, []
            consume(items)

    def when_closed(self, call: Callable[[Closed], object]) -> None:
        """Call `call` with the final item, even if there is no reader any more. It must not raise or block."""
        self._on_closed = call

    async def get(self) -> list[OutletEvent]:
        """Wait for items and take all of them. A checkpoint."""
        await self._wait_item()
        items, self._items = self._items, []
        return items

    async def peek(self) -> OutletEvent:
        """Wait for the first item and return it without taking it. A checkpoint."""
        await self._wait_item()
        return self._items[0]

    async def _wait_item(self) -> None:
        if self._items:
            await trio.lowlevel.checkpoint()
            return
        if self._task is not None:
            raise trio.BusyResourceError("a mailbox has one reader")
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
