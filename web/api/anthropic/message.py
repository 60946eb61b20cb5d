"""The response of the Messages API: a whole message, or the events of a stream.

    message_start, content_block_start, content_block_delta*, content_block_stop, message_delta, message_stop

What must always hold: nothing is sent before the first token, when the prompt's numbers are final; the last numbers are
those of the record; an error is one `error` event at the end.
"""

from __future__ import annotations

from typing import Any

import structlog

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import Sink, json_for_line
from ...request.errors import APIError, error_of
from ...request.tally import Tally
from ..stream import StreamWriter, Transcript
from .usage import delta_usage, messages_usage

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def whole_message(message_id: str, model: str, transcript: Transcript, record: UsageRecord) -> dict[str, Any]:
    """Return the body of a whole response."""
    stop_match = transcript.stop_matches.get(0)
    return {
        **_message(message_id, model),
        "content": [{"type": "text", "text": transcript.content(0).text, "citations": None}],
        "stop_reason": _stop_reason(transcript.finish_reasons.get(0), stop_match),
        "stop_sequence": stop_match,
        "usage": messages_usage(record, record.completion_tokens, record.reasoning_tokens),
    }


def _message(message_id: str, model: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }


def _stop_reason(reason: FinishReason | None, stop_match: str | None) -> str:
    if stop_match is not None:
        return "stop_sequence"
    return "max_tokens" if reason is FinishReason.LENGTH else "end_turn"


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_for_line({"type": name, **fields}) + b"\n\n"


_BLOCK_START = _event("content_block_start", index=0, content_block={"type": "text", "text": "", "citations": None})
_BLOCK_STOP = _event("content_block_stop", index=0)
_STOP = _event("message_stop")
_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_TEXT_END = b"}}\n\n"


class MessageWriter(StreamWriter):
    """Encodes a stream's events into its sink."""

    def __init__(
        self,
        sink: Sink,
        message_id: str,
        model: str,
        request_id: str,
        tally: Tally,
        log: structlog.typing.BindableLogger,
    ) -> None:
        super().__init__(sink, tally, log)
        self._message_id = message_id
        self._model = model
        self._request_id = request_id
        self._begun = False
        self._reason: FinishReason | None = None
        self._stop_match: str | None = None

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                opening = b"" if self._begun else self._opening()
                self._tally.add(event)
                if event.text:
                    self._sink.push(opening + _TEXT + json_for_line(event.text) + _TEXT_END)
                else:
                    self._sink.push(opening)
                if event.finish_reason is not None:
                    self._reason, self._stop_match = event.finish_reason, event.stop_match
            case Started():
                self._tally.start(event)
            case Closed():
                self._close(event)

    def _opening(self) -> bytes:
        """Return the first events."""
        self._begun = True
        message = {**_message(self._message_id, self._model), "usage": messages_usage(self._tally, 0)}
        return _event("message_start", message=message) + _BLOCK_START

    def _close(self, closed: Closed) -> None:
        error = error_of(closed)
        if error is not None:
            self._end(self._failure(error))
            return
        opening = b"" if self._begun else self._opening()
        record = closed.record
        delta = {
            "stop_reason": _stop_reason(self._reason, self._stop_match),
            "stop_sequence": self._stop_match,
            "stop_details": None,
            "container": None,
        }
        usage = delta_usage(record, record.completion_tokens, record.reasoning_tokens)
        self._end(opening + _BLOCK_STOP + _event("message_delta", delta=delta, usage=usage) + _STOP)

    def _failure(self, error: APIError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body(self._request_id) + b"\n\n"
