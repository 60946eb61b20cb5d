"""The response of the Messages API: a whole message, or the events of a stream.

    message_start, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop

What must always hold: nothing is sent before the first token, when the prompt's numbers are final; the last numbers are
those of the record; a block is stopped before the next one starts; an error is one `error` event at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord

from ...http.sse import json_for_line
from ...request.errors import APIError, error_of
from ...request.tally import Tally
from ..content import CallIds, shown_events
from ..generation import GenerationRequest
from ..stream import Stream, StreamWriter, Transcript
from .blocks import BlockWriter, whole_blocks

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def whole_message(
    message_id: str, wanted: GenerationRequest, transcript: Transcript, record: UsageRecord, call_ids: CallIds
) -> Iterator[bytes]:
    """Yield the body of a whole response, as JSON."""
    content = transcript.content(0)
    reason, match = transcript.finish_reasons.get(0), transcript.stop_matches.get(0)
    fields = {
        **_message(message_id, wanted.model),
        **_ending(reason, match, has_call=content.has_complete_call),
        "usage": _message_usage(record),
    }
    del fields["content"]
    yield orjson.dumps(fields)[:-1] + b',"content":'
    if wanted.is_prewarm:
        yield b"[]"
    else:
        yield from whole_blocks(content, message_id, call_ids)
    yield b"}"


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


def _ending(reason: FinishReason | None, stop_match: str | None, *, has_call: bool) -> dict[str, Any]:
    """Return why a message ended. A complete call comes before a stop string: it has to be carried out."""
    if reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_call:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "end_turn" if stop_match is None else "stop_sequence", "stop_sequence": stop_match}


def _message_usage(known: UsageRecord | Tally) -> dict[str, Any]:
    """Return the `usage` of a message or of `message_start`, before which no token has come (docs/use/usage.md)."""
    return {
        **_usage(known),
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        "speed": "standard",
    }


def _usage(known: UsageRecord | Tally) -> dict[str, Any]:
    """Return the `usage` of `message_delta`, which repeats all counts.

    The three counts of input tokens are disjoint positions of the prompt, and add up to it. If the engine does not
    count what it reuses, the two cache fields are null and the whole prompt is in the first.
    """
    cached = known.cached_tokens
    is_counted = cached is not None
    created = known.created_5m_tokens + known.created_1h_tokens if is_counted else 0
    split = {"ephemeral_5m_input_tokens": known.created_5m_tokens, "ephemeral_1h_input_tokens": known.created_1h_tokens}
    return {
        "input_tokens": (known.prompt_tokens or 0) - (cached or 0) - created,
        "cache_creation_input_tokens": created if is_counted else None,
        "cache_read_input_tokens": cached,
        "cache_creation": split if is_counted else None,
        "output_tokens": known.completion_tokens,
        "output_tokens_details": {"thinking_tokens": known.reasoning_tokens},
    }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_for_line({"type": name, **fields}) + b"\n\n"


_STOP = _event("message_stop")


class MessageWriter(StreamWriter):
    def __init__(self, stream: Stream, message_id: str, wanted: GenerationRequest, call_ids: CallIds) -> None:
        super().__init__(stream)
        self._message_id = message_id
        self._wanted = wanted
        self._request_id = call_ids.request_id
        self._blocks = BlockWriter(message_id, call_ids)
        self._begun = False
        self._reason: FinishReason | None = None
        self._stop_match: str | None = None

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                opening = b"" if self._begun else self._opening()
                self._tally.add(event)
                told = self._blocks.text(event.text) if event.text else self._shown(event)
                self._sink.push(opening + told if opening else told)
                if event.finish_reason is not None:
                    self._reason, self._stop_match = event.finish_reason, event.stop_match
            case Started():
                self._tally.start(event)
            case Closed():
                self._close(event)

    def _shown(self, delta: Delta) -> bytes:
        shown = shown_events(delta.events, with_reasoning=self._wanted.include_reasoning)
        return b"".join(map(self._blocks.show, shown))

    def _opening(self) -> bytes:
        self._begun = True
        message = {**_message(self._message_id, self._wanted.model), "usage": _message_usage(self._tally)}
        return _event("message_start", message=message)

    def _close(self, closed: Closed) -> None:
        error = error_of(closed)
        if error is not None:
            self._fail(error)
            return
        opening = b"" if self._begun else self._opening()
        ending = _ending(self._reason, self._stop_match, has_call=self._blocks.has_complete_call)
        delta = {**ending, "stop_details": None, "container": None}
        blocks = b"" if self._wanted.is_prewarm else self._blocks.end()
        self._end(opening + blocks + _event("message_delta", delta=delta, usage=_usage(closed.record)) + _STOP)

    def _fail(self, error: APIError) -> None:
        self._end(b"event: error\ndata: " + error.anthropic_body(self._request_id) + b"\n\n")
