"""The way of a streamed request to the tokenizer, beside the handler that answers it (`answer.py`).

A handler cannot wait until the tokenizer has room: its client gets a head and a heartbeat in time, as in the queue.

What must always hold: a request that cannot be started has an answer that says so, whether its stream has begun or not.
"""

from __future__ import annotations

from collections.abc import Callable

from quipu.actors.request_desk.interface import Ticket

from .stream import StreamWriter


class RequestStart:
    """Starts one request, in a task of its scope."""

    def __init__(self, ticket: Ticket, stop_waiting: Callable[[], object]) -> None:
        """`stop_waiting` is called where the start fails before there is a writer."""
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
