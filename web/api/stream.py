"""From a request's events to its response: the base class of every API's streams, and the collected whole response.

A consumer is attached to the request's mailbox (`mailbox.attach(writer.consume)`) and runs in the task that produced
the event, so a token reaches the sink without waking any task but the response body.

What must always hold: `consume` never raises; nothing is pushed after the end of a stream; the usage of a finished
response is that of the record in `Closed`, whatever the tally says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import trio

from quipu.actors.messages.handler import Closed, Delta, OfPrompt, OutletEvent, ScoredDelta, Started
from quipu.actors.messages.outcomes import FinishReason
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.shared.token_decoding import TokenText

from ..request.errors import APIError, error_of, internal
from ..request.tally import Tally
from ..telemetry.logs import frames_of
from .content import Content, shown_events
from .text_scores import KeptScores, TextScores


@attrs.define(eq=False)
class Transcript:
    """Collects a whole response. Wakes the handler once, at its end."""

    tally: Tally
    with_reasoning: bool = True
    """Reasoning is part of the response."""
    contents: dict[int, Content] = attrs.field(factory=dict)
    """By choice, like all that follows."""
    finish_reasons: dict[int, FinishReason] = attrs.field(factory=dict)
    stop_matches: dict[int, str] = attrs.field(factory=dict)
    """The stop string that ended the choice, if one did."""
    stop_token_ids: dict[int, int] = attrs.field(factory=dict)
    """The token that ended the choice, if one did."""
    scores: dict[int, KeptScores] = attrs.field(factory=dict)
    """Output tokens, if their logprobs were requested."""
    text_scores: TextScores | None = None
    """Those of the text of the only choice alone, if they are what was requested."""
    token_ids: dict[int, array[int]] = attrs.field(factory=dict)
    """Output tokens, if their ids were requested."""
    _of_prompts: dict[int, OfPrompt] = attrs.field(factory=dict)
    _token_texts: dict[int, TokenText] = attrs.field(factory=dict)
    """Of every token in `scores`."""
    closed: Closed | None = None
    _done: trio.Event = attrs.field(factory=trio.Event)

    def consume(self, events: list[OutletEvent]) -> None:
        for event in events:
            match event:
                case Delta():
                    self._add(event)
                case Started():
                    self.tally.start(event)
                case Closed():
                    self.closed = event
                    self._done.set()

    def _add(self, delta: Delta) -> None:
        self.tally.add(delta)
        index = delta.index
        content = self.contents.get(index)
        if content is None:
            content = self.contents[index] = Content()
        content.add_text(delta.text)
        for event in shown_events(delta.events, with_reasoning=self.with_reasoning):
            content.add(event)
        if delta.token_ids:
            self.token_ids.setdefault(index, array("q")).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reasons[index] = delta.finish_reason
        if delta.stop_match is not None:
            self.stop_matches[index] = delta.stop_match
        if delta.stop_token_id is not None:
            self.stop_token_ids[index] = delta.stop_token_id
        if self.text_scores is not None:
            self.text_scores.add(delta)
        elif isinstance(delta, ScoredDelta):
            self._keep(delta)

    def _keep(self, event: ScoredDelta) -> None:
        if event.of_prompt is not None:
            self._of_prompts[event.index] = event.of_prompt
        columns = self.scores.get(event.index)
        if columns is None:
            columns = self.scores[event.index] = KeptScores(self._token_texts)
        for token in event.scores:
            columns.append(token)

    async def wait_closed(self) -> Closed:
        await self._done.wait()
        if self.closed is None:
            raise RuntimeError("a transcript was woken up before its request was closed")
        return self.closed

    def content(self, index: int) -> Content:
        return self.contents.get(index) or Content()

    def of_prompt(self, index: int) -> OfPrompt:
        return self._of_prompts.get(index) or OfPrompt()


class EventSink(Protocol):
    """Where the chunks of a stream go: a `Sink`, or a log of events that several clients read."""

    finished: bool

    def push(self, data: bytes) -> None: ...

    def push_slowly(self, chunks: Iterator[bytes]) -> None: ...

    def finish(self) -> None: ...


@attrs.frozen
class Stream:
    sink: EventSink
    tally: Tally
    log: Any


class StreamWriter(ABC):
    """Encodes a request's events, in the format of one API, into the sink of its stream."""

    def __init__(self, stream: Stream) -> None:
        self._sink = stream.sink
        self._tally = stream.tally
        self._log = stream.log

    def consume(self, events: list[OutletEvent]) -> None:
        """Push `events`. Called by the mailbox."""
        if self._sink.finished:
            return
        try:
            for event in events:
                self._consume_one(event)
        except Exception as error:
            self.crash(error)

    @abstractmethod
    def _consume_one(self, event: OutletEvent) -> None:
        """Push the bytes of one event, and `_end` with the last one. Updates the tally."""

    @abstractmethod
    def _fail(self, error: APIError) -> None:
        """End the stream of a request that has failed."""

    def _push_slowly(self, chunks: Iterator[bytes]) -> None:
        """Push chunks, each made when the client has read those before it."""
        self._sink.push_slowly(self._guard(chunks))

    def _guard(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from chunks
        except Exception as error:
            self.crash(error)

    def crash(self, error: Exception) -> None:
        """End the stream for an error of this server."""
        # The caller serves every request: an error in this one must not affect the others.
        self._fail(internal())
        self._log.error("stream.crashed", error_type=type(error).__name__, frames=frames_of(error))

    def _end(self, last: bytes) -> None:
        self._sink.push(last)
        self._sink.finish()


class AnswerWriter(StreamWriter):
    """Writes each delta of an answer, and at its end what is known then."""

    def _consume_one(self, event: OutletEvent) -> None:
        match event:
            case Delta():
                self._tally.add(event)
                self._add(event)
            case Started():
                self._tally.start(event)
            case Closed():
                error = error_of(event)
                if error is None:
                    self._end(self._last(event.record))
                else:
                    self._fail(error)

    @abstractmethod
    def _add(self, delta: Delta) -> None:
        """Push what a delta adds, which the tally has by now."""

    @abstractmethod
    def _last(self, record: UsageRecord) -> bytes:
        """Return the last bytes of an answer that has ended well."""
