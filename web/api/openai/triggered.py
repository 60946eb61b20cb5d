"""Responses to inputs that end with a `compaction_trigger`: one item, with a summary of the rest (`compaction.py`).

Codex CLI asks in this way, streamed, and keeps what it wants of its history itself. A trigger anywhere else in an input
is skipped.

What must always hold: such a response has exactly one item, whole or as a stream, and is complete, also if the summary
was cut; it is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quipu.actors.messages.handler import Delta, OutletEvent
from quipu.actors.messages.usage_record import UsageRecord

from ...auth.sealed_texts import TenantSeal
from ...request.errors import APIError, bad_value
from ..content import CallIds, Content, shown_events
from ..stream import Stream, Transcript
from .compaction import quiet, sealed_item
from .response_state import ResponseState
from .responses import ResponseRequest
from .responses_body import with_items
from .responses_reply import ResponseReply
from .responses_stream import ResponseWriter

TRIGGER = "compaction_trigger"


def is_triggered(body: Mapping[str, Any]) -> bool:
    """Return whether a body asks for a summary of its input."""
    items = body.get("input")
    last = items[-1] if type(items) is list and items else None
    return type(last) is dict and last.get("type") == TRIGGER


def triggered_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the response to the rest of the input of a body that asks for a summary."""
    return quiet({**body, "input": body["input"][:-1]})


class TriggeredReply(ResponseReply):
    def __init__(self, asked_for: ResponseRequest, state: ResponseState, call_ids: CallIds, seal: TenantSeal) -> None:
        """`asked_for` is for the summary, and `state` what the body says. Raises APIError."""
        named = {"background": state.is_background, "conversation": state.conversation}
        for param in (param for param, value in named.items() if value):
            raise bad_value(param, f"not allowed where the input ends with an item of the type `{TRIGGER}`")
        super().__init__(asked_for, call_ids)
        self.mark_unstored()
        self._request_id = call_ids.request_id
        self._seal = seal

    def pieces(self, transcript: Transcript, record: UsageRecord) -> Iterator[bytes]:
        item = self.item(transcript.content(0))
        return with_items(self.versions().served(record, is_cut=False), (item,))

    def item(self, content: Content) -> dict[str, Any]:
        """Return the only item. Raises APIError if the model has written nothing."""
        return sealed_item(self._request_id, content, self._seal)

    def writer(self, stream: Stream) -> ResponseWriter:
        return _TriggeredWriter(stream, self)


class _TriggeredWriter(ResponseWriter):
    """Shows nothing of the output until it is sealed."""

    def __init__(self, stream: Stream, reply: TriggeredReply) -> None:
        super().__init__(stream, reply.versions(), reply.output_items())
        self._reply = reply
        self._summary = Content()

    def _consume_one(self, event: OutletEvent) -> None:
        if not isinstance(event, Delta):
            super()._consume_one(event)
            return
        self._tally.add(event)
        self._summary.add_text(event.text)
        for shown in shown_events(event.events, with_reasoning=False):
            self._summary.add(shown)

    def _closing(self, record: UsageRecord) -> tuple[bytes, Iterator[bytes]]:
        try:
            item = self._reply.item(self._summary)
        except APIError as error:
            return self._failing(error)
        first, event = self._opening(), self._events.event
        first += event("response.output_item.added", output_index=0, item=item)
        first += event("response.output_item.done", output_index=0, item=item)
        served = self._versions.served(record, is_cut=False)
        return first, self._events.response_event("response.completed", with_items(served, (item,)))
