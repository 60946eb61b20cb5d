"""From a request's outlet events to what its client reads: a whole answer, or the chunks of a stream.

A reader is attached to the request's mailbox (`mailbox.attach(reader.consume)`) and runs in the task that produced the
event, so a token reaches the sink without waking anybody but the response body. Each endpoint supplies its own shape
of a choice (`completions.py`, `chat.py`).

What must always hold: `consume` never raises; after the end of a stream nothing more is pushed; the usage that a
finished answer shows is that of the record in `Closed`, whatever was tallied on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs
import orjson
import structlog
import trio

from quipu.actors.messages import Closed, Delta, FinishReason, OutletEvent, Started
from quipu.web.errors import error_of, frames_of, internal
from quipu.web.openai.generation import Delivery
from quipu.web.sse import DONE, Sink
from quipu.web.usage import Tally, openai_usage


@attrs.frozen
class Envelope:
    """What all chunks of an answer share."""

    id: str
    created: int
    """Unix seconds."""
    model: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


@attrs.define(eq=False)
class Transcript:
    """Gathers a whole answer; one wake-up of the handler, at its end."""

    tally: Tally
    texts: dict[int, list[str]] = attrs.field(factory=dict)
    """By choice."""
    finish_reasons: dict[int, FinishReason] = attrs.field(factory=dict)
    closed: Closed | None = None
    _done: trio.Event = attrs.field(factory=trio.Event)

    def consume(self, events: list[OutletEvent]) -> None:
        for event in events:
            match event:
                case Delta():
                    self.tally.add(event)
                    self.texts.setdefault(event.index, []).append(event.text)
                    if event.finish_reason is not None:
                        self.finish_reasons[event.index] = event.finish_reason
                case Started():
                    self.tally.start(event)
                case Closed():
                    self.closed = event
                    self._done.set()

    async def wait_closed(self) -> Closed:
        """Wait for the request's last event."""
        await self._done.wait()
        if self.closed is None:
            raise RuntimeError("a transcript was woken before its request was closed")
        return self.closed

    def text(self, index: int) -> str:
        return "".join(self.texts.get(index, ()))


_FINISH: dict[FinishReason | None, bytes] = {
    reason: b',"logprobs":null,"finish_reason":' + orjson.dumps(reason) + b"}]" for reason in (None, *FinishReason)
}
"""The end of a choice, and of the list of choices."""


class ChunkWriter(ABC):
    """Encodes a stream's chunks into its sink. Everything but text, choice and usage is encoded once, up front."""

    OBJECT_NAME: str

    def __init__(
        self, sink: Sink, envelope: Envelope, delivery: Delivery, tally: Tally, log: structlog.typing.BindableLogger
    ) -> None:
        self._sink = sink
        self._delivery = delivery
        self._tally = tally
        self._log: Any = log
        head = b"data: " + orjson.dumps(envelope.fields(self.OBJECT_NAME))[:-1]
        self._choice_head = head + b',"choices":[{"index":'
        self._no_choice_head = head + b',"choices":[]'
        self._plain_end = b',"usage":null}\n\n' if delivery.include_usage else b"}\n\n"
        self._running_tail = _FINISH[None] + self._plain_end

    @abstractmethod
    def render(self, delta: Delta) -> bytes:
        """The chunks of one delta that has a text or a finish reason."""

    def consume(self, events: list[OutletEvent]) -> None:
        """Push what has come; called by the mailbox."""
        if self._sink.finished:
            return
        try:
            for event in events:
                self._consume_one(event)
        except Exception as error:
            # The mailbox's writer serves every request: this one's fault must stay its own.
            self._end(b"data: " + internal().body() + b"\n\n")
            self._log.error("stream.crashed", error_type=type(error).__name__, frames=frames_of(error))

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                if event.text or event.finish_reason is not None:
                    self._sink.push(self.render(event))
                else:
                    self._tally.add(event)
            case Started():
                self._tally.start(event)
            case Closed():
                self._close(event)

    def _close(self, closed: Closed) -> None:
        error = error_of(closed)
        if error is not None:
            self._end(b"data: " + error.body() + b"\n\n")
            return
        if not self._delivery.include_usage:
            self._end(b"")
            return
        usage = openai_usage(closed.record, with_tiers=self._delivery.with_tiers)
        self._end(self._no_choice_head + b',"usage":' + orjson.dumps(usage) + b"}\n\n")

    def _end(self, last: bytes) -> None:
        # Clients stop reading at [DONE], also after an error.
        self._sink.push(last + DONE)
        self._sink.finish()

    def _tail(self, finish_reason: FinishReason | None) -> bytes:
        """What follows a choice's text to the end of its chunk, with the usage so far where it was asked for."""
        if not self._delivery.continuous_usage:
            # Nearly every chunk of every stream ends like this.
            return self._running_tail if finish_reason is None else _FINISH[finish_reason] + self._plain_end
        usage = self._tally.openai(with_tiers=self._delivery.with_tiers)
        return b"".join((_FINISH[finish_reason], b',"usage":', orjson.dumps(usage), b"}\n\n"))
