"""Responses without an app: a request's reply is given its events, and returns the bytes of its response."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import attrs
import structlog
from structlog.testing import capture_logs

from quipu.actors.messages.handler import Closed, OutletEvent
from quipu.actors.messages.output import OutputFormat
from quipu.web.api.answer import ParsedRequest, Reader, Reply
from quipu.web.api.stream import Stream, Transcript
from quipu.web.http.sse import Sink
from quipu.web.options import AppOptions
from quipu.web.request.tally import Tally
from tests.web.fakes import INFO


async def reply_to(read: Reader, body: dict[str, Any], *, has_short_ids: bool = False, **changes: Any) -> Reply:
    """Return the reply of the request `r1`; `changes` are made to what was read of its body."""
    info = attrs.evolve(INFO, output=OutputFormat(has_short_call_ids=has_short_ids))
    reply = await read(ParsedRequest({"model": "tiny", **body}, "r1", info, AppOptions(), lambda num_bytes: None))
    reply.wanted = attrs.evolve(reply.wanted, **changes)
    return reply


def whole_pieces(reply: Reply, events: Iterable[OutletEvent]) -> list[bytes]:
    """Return the body of a whole response, in the pieces in which it is made."""
    transcript = Transcript(Tally(), reply.wanted.include_reasoning)
    transcript.consume(list(events))
    closed = transcript.closed
    assert isinstance(closed, Closed)
    return list(reply.pieces(transcript, closed.record))


def whole_bytes(reply: Reply, events: Iterable[OutletEvent]) -> bytes:
    """Return the body of a whole response, as it is sent."""
    return b"".join(whole_pieces(reply, events))


def whole(reply: Reply, events: Iterable[OutletEvent]) -> Any:
    """Return the body of a whole response."""
    return json.loads(whole_bytes(reply, events))


def streamed(reply: Reply, events: Iterable[OutletEvent]) -> list[dict[str, Any]]:
    """Return the events of a stream, which must have ended without a crash of its writer."""
    sink = Sink(1 << 30, lambda: None)
    writer = reply.writer(Stream(sink, Tally(), structlog.get_logger()))
    with capture_logs() as crashes:
        for event in events:
            writer.consume([event])
    assert sink.finished and not crashes, crashes
    data = b""
    while not sink.is_over:
        data += sink.take_nowait()
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
