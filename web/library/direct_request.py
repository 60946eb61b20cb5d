"""One request of the Python API, in the thread of the actors: read as over HTTP, and answered without it.

What must always hold: whatever ends a request, its ticket is left in the thread, which frees its account, sequences and
blocks within a step; an error is the endpoint's own, as `RequestError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from quipu.actors.config import declarations
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.request_desk.interface import Desk, DeskClosed, ServingInfo

from ..api.answer import ParsedRequest, Reply, with_adapter
from ..api.body_table import SHAPES
from ..api.generation import check_task
from ..api.ignored_fields import ignored_fields
from ..api.openai.routes import read_chat, read_completion
from ..api.stream import Transcript
from ..options import AppOptions
from ..request.errors import APIError, raise_error_of
from ..request.tally import Tally
from .library_errors import RequestError
from .outputs import CompletionOutput, RequestOutput

TENANT: Final = "default"
_READERS: Final = {declarations.COMPLETIONS: read_completion, declarations.CHAT: read_chat}
_OPTIONS: Final = AppOptions(allow_client_priority=True)


@attrs.frozen
class Asked:
    """A request whose body was checked."""

    request_id: str
    endpoint: str
    reply: Reply
    info: ServingInfo

    def caller(self) -> Caller:
        adapter, own = self.reply.wanted.adapter or None, self.info.model_names[0]
        return Caller(TENANT, model=self.reply.wanted.model, adapter=adapter, parent=own if adapter else None)


def _take(num_bytes: int) -> None:
    """Let a caller of the library have all memory that its request needs."""


async def read_request(desk: Desk, body: Mapping[str, Any]) -> Asked:
    """Check the body of a chat, which has `messages`, or of a completion. Raises RequestError."""
    endpoint = declarations.CHAT if "messages" in body else declarations.COMPLETIONS
    fields = {"model": desk.info.model_names[0], "return_token_ids": True, **body}
    request_id = desk.new_request_id()
    try:
        check_task(endpoint, desk.info)
        reply = await _READERS[endpoint](ParsedRequest(fields, request_id, desk.info, _OPTIONS, _take))
    except APIError as error:
        raise _own(error) from None
    for name in ((await ignored_fields(fields, SHAPES[endpoint])).header() or "").split(","):
        if name and name in fields:  # what is unknown within a message or a tool has no effect, as over HTTP
            raise RequestError(
                f"`{name}` has no effect: there is no such field", param=name, code="unknown_field", status=400
            )
    reply.wanted = with_adapter(reply.wanted, desk.info)
    return Asked(request_id, endpoint, reply, desk.info)


class RunningRequest:
    """A request that was opened: its output so far, and its end."""

    def __init__(self, asked: Asked, on_change: Callable[[], object] = lambda: None) -> None:
        """`on_change` is called in the task that produced an event. It must not raise or block."""
        self._asked = asked
        self._on_change = on_change
        self._transcript = Transcript(Tally(), asked.reply.wanted.include_reasoning)
        self.version = 0
        """Counts changes of the output."""

    async def run(self, desk: Desk) -> bytes:
        """Have it answered, and return the body of the response. Raises RequestError."""
        wanted = self._asked.reply.wanted
        try:
            ticket = desk.open(
                wanted.encode(self._asked.request_id, TENANT), self._asked.endpoint, self._asked.caller()
            )
        except DeskClosed as error:
            raise RequestError(str(error), code="overloaded", status=503) from None
        try:
            ticket.mailbox.attach(self._consume)
            await ticket.start()
            closed = await self._transcript.wait_closed()
        finally:
            ticket.leave()
        return self._body(closed)

    def _body(self, closed: Closed) -> bytes:
        try:
            raise_error_of(closed)
        except APIError as error:
            raise _own(error) from None
        return b"".join(self._asked.reply.pieces(self._transcript, closed.record))

    def _consume(self, events: list[OutletEvent]) -> None:
        self._transcript.consume(events)
        self.version += 1
        self._on_change()

    def so_far(self) -> RequestOutput:
        """Return the output as it is now."""
        transcript = self._transcript
        choices = [
            CompletionOutput(
                index,
                transcript.content(index).text,
                tuple(transcript.token_ids.get(index, ())),
                transcript.finish_reasons.get(index),
                reasoning=transcript.content(index).reasoning or None,
            )
            for index in range(self._asked.reply.wanted.num_sequences)
        ]
        return RequestOutput(self._asked.request_id, tuple(choices), finished=False)


def _own(error: APIError) -> RequestError:
    return RequestError(error.message, param=error.param, code=error.code, status=int(error.status))
