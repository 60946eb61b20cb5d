"""The events of a streamed response, in their order:

    response.created, response.in_progress
    response.output_item.added, response.content_part.added
    response.output_text.delta ...
    response.output_text.done, response.content_part.done, response.output_item.done
    response.completed | response.incomplete

A request that fails midway ends with `error` and `response.failed` instead: clients raise on the former, and find the
usage in the latter. There is no `[DONE]`.

What must always hold: `sequence_number` counts from 0 without a gap; only the last event has usage; the constant parts
of a delta are encoded once, so that a token costs no more than joining bytes.
"""

from __future__ import annotations

from typing import Any

import orjson
import structlog

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import Sink, json_for_line
from ...request.errors import APIError, error_of
from ...request.tally import Tally
from ..stream import StreamWriter
from .responses_body import Draft, text_part

_DELTA_HEAD = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'
_DELTA_TAIL = b',"logprobs":[]}\n\n'


class ResponseWriter(StreamWriter):
    """Encodes one response's events into its sink."""

    def __init__(self, sink: Sink, draft: Draft, tally: Tally, log: structlog.typing.BindableLogger) -> None:
        super().__init__(sink, tally, log)
        self._draft = draft
        self._num_events = 0
        self._has_item = False
        """The output item has been sent."""
        self._texts: list[str] = []
        """Its text so far."""
        self._finish_reason: FinishReason | None = None
        self._record: UsageRecord | None = None
        self._part = {"item_id": draft.item_id, "output_index": 0, "content_index": 0}
        self._delta_middle = b"," + orjson.dumps(self._part)[1:-1] + b',"delta":'

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                self._tally.add(event)
                opening = b"" if self._has_item else self._open_item()
                if event.text:
                    number = b"%d" % self._num_events
                    text = json_for_line(event.text)
                    self._sink.push(b"".join((opening, _DELTA_HEAD, number, self._delta_middle, text, _DELTA_TAIL)))
                    self._num_events += 1
                    self._texts.append(event.text)
                else:
                    self._sink.push(opening)
                if event.finish_reason is not None:
                    self._finish_reason = event.finish_reason
            case Started():
                self._tally.start(event)
                self._sink.push(self._opening())
            case Closed():
                self._record = event.record
                error = error_of(event)
                self._end(self._closing(event.record) if error is None else self._failure(error))

    def _event(self, name: str, **fields: Any) -> bytes:
        data = json_for_line({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def _opening(self) -> bytes:
        """Return the first events, unless they have been sent."""
        if self._num_events:
            return b""
        response = self._draft.body("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _open_item(self) -> bytes:
        """Return the events before the first text."""
        self._has_item = True
        item = self._draft.message("in_progress")
        return (
            self._opening()
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._part, part=text_part(""))
        )

    def _closing(self, record: UsageRecord) -> bytes:
        opening = b"" if self._has_item else self._open_item()
        text = "".join(self._texts)
        response = self._draft.served(text, self._finish_reason, record)
        status = response["status"]
        return b"".join(
            (
                opening,
                self._event("response.output_text.done", **self._part, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._part, part=text_part(text)),
                self._event("response.output_item.done", output_index=0, item=response["output"][0]),
                self._event(f"response.{status}", response=response),
            )
        )

    def _failure(self, error: APIError) -> bytes:
        told = {"type": error.error_type, "code": error.code, "message": error.message, "param": error.param}
        text = "".join(self._texts) if self._has_item else None
        known = self._tally if self._record is None else self._record
        # The client's type has the fields of an `error` event at its top level, but it raises on a nested object.
        return b"".join(
            (
                self._opening(),
                self._event("error", **{**told, "type": "error"}, error=told),
                self._event("response.failed", response=self._draft.failed(text, error, known)),
            )
        )
