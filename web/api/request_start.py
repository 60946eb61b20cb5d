"""The start of a streamed request, beside its handler. Used by `answer.py`."""

from __future__ import annotations

from collections.abc import Callable

from quipu.actors.request_desk.interface import Ticket

from .stream import StreamWriter


class RequestStart:
    """Passes a streamed request to the tokenizer, in a task beside its handler, which cannot wait for room there: its
    client gets a head and a heartbeat in time."""

    def __init__(self, ticket: Ticket, stop_waiting: Callable[[], object]) -> None:
        """`stop_waiting` is called if the start fails before there is a writer."""
        self._ticket = ticket
        self._stop_waiting = stop_waiting
        self.error: Exception | None = None
        self.writer: StreamWriter | None = None
        """Of the stream, once it has begun."""

    async def run(self) -> None:
        try:
            await self._ticket.start()
        except Exception as error:
            if self.writer is not None:
                self.writer.crash(error)
            else:
                self.error = error
                self._stop_waiting()
