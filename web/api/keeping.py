"""Answers that are stored for their clients: what `answer.py` asks of whoever stores them.

A keeper begins before the request is opened, and ends with the whole answer before its client hears the end, so that
the client may refer to what it has got at once.

What must always hold: nobody's answer is lost because it cannot be stored; an answer whose client left is not stored,
unless it is generated in the background.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

from quart import Response

from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.request_desk.interface import Ticket

from ..request.request_context import RequestContext
from .stream import StreamWriter, Transcript

Ts = TypeVarTuple("Ts")
Open = Callable[[RequestContext], Ticket]
"""Opens the request in a context, whose scope leaves it. Raises DeskClosed."""

RunApart = Callable[[Open], Awaitable[Response]]
"""Opens a background request. Raises APIError and DeskClosed."""


class Keeper(ABC):
    """Stores one request and its answer."""

    @property
    def run_apart(self) -> RunApart | None:
        """Return what opens the request in the background, and returns what its client gets of it.

        None: the client waits for the answer.
        """
        return None

    @abstractmethod
    async def begin(self) -> None:
        """Store what is known before the answer. Raises APIError if the request cannot be served without that."""

    @abstractmethod
    async def end(self, transcript: Transcript, closed: Closed) -> None:
        """Store the answer, or note that it could not be. Raises nothing but what a bug or a lack of memory raises."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the request if it has not ended. Its scope calls this in the end."""

    @abstractmethod
    def start_soon(self, task: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start a task that may outlive the request."""


class KeptStream:
    """Passes a stream's events to its writer; the end only when the answer is stored."""

    def __init__(self, writer: StreamWriter, keeper: Keeper, transcript: Transcript) -> None:
        self._writer = writer
        self._keeper = keeper
        self._transcript = transcript

    def consume(self, events: list[OutletEvent]) -> None:
        """Take `events`. Called by the mailbox."""
        closed = events[-1] if isinstance(events[-1], Closed) else None
        self._transcript.consume(events)
        if closed is None:
            self._writer.consume(events)
            return
        if len(events) > 1:
            self._writer.consume(events[:-1])
        self._keeper.start_soon(self._end, closed)

    async def _end(self, closed: Closed) -> None:
        try:
            await self._keeper.end(self._transcript, closed)
        except Exception as error:  # out of memory, or a bug: this task is not the request's own
            self._writer.crash(error)
        else:
            self._writer.consume([closed])
