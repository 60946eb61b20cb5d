"""The contents and timing of one streamed response.

An `AnswerReader` takes bytes with the time of their arrival and returns the request's outcome at the end. Unknown is
not 0: a count that the server did not send stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise, repeat
from typing import Any

import attrs
import msgspec

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
MAX_MESSAGE = 300


@attrs.frozen
class Failure:
    kind: str
    """A short name by which failures are counted: `http_503`, `connect`, `stream_cut`."""
    message: str


@attrs.frozen
class ReportedUsage:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@attrs.frozen
class Outcome:
    """One request that has ended. All times are of one clock."""

    started_s: float
    ended_s: float
    output_at_s: tuple[float, ...]
    text: str
    usage: ReportedUsage
    failure: Failure | None
    saw_done: bool
    """Whether the stream ended with `[DONE]`."""
    finish_reason: str | None = None
    finished_s: float | None = None
    """When the finish reason arrived: a token that shows no text, such as the last one, is over by then."""

    @property
    def first_token_s(self) -> float | None:
        return self.output_at_s[0] if self.output_at_s else None

    @property
    def output_s(self) -> float | None:
        """The time from the first output to the last; None if all of it arrived at once, so that it is not known."""
        if not self.output_at_s:
            return None
        end_s = self.output_at_s[-1] if self.finished_s is None else max(self.finished_s, self.output_at_s[-1])
        return end_s - self.output_at_s[0] or None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The times between chunks with output. Chunks that arrive together share the time since the one before."""
        arrivals = [(at_s, len(list(together))) for at_s, together in groupby(self.output_at_s)]
        return tuple(
            gap_s
            for (earlier_s, _), (later_s, count) in pairwise(arrivals)
            for gap_s in repeat((later_s - earlier_s) / count, count)
        )


@attrs.frozen
class Piece:
    """Some output, as it arrives."""

    text: str
    is_reasoning: bool = False


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@attrs.define(eq=False)
class EventReader:
    """Parses server-sent events (WHATWG HTML, section 9.2.6), however the network has split them.

    Lines stay bytes until an event is complete, so a split character is never decoded in halves. An incomplete event at
    the end of the stream is dropped, as the standard requires.
    """

    _tail: bytes = b""
    _data: list[bytes] = attrs.field(factory=list)
    _has_begun: bool = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each event that these bytes complete. Exhaust it before feeding again."""
        lines = (self._tail + received).splitlines(keepends=True)
        # A lone CR at the end may be the first half of a CRLF.
        self._tail = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            if not self._has_begun:
                self._has_begun = True
                line = line.removeprefix(BOM)
            data = self._take(line.rstrip(b"\r\n"))
            if data is not None:
                yield data

    @property
    def is_between(self) -> bool:
        """Whether all bytes so far belong to complete events."""
        return not self._tail.strip(b"\r\n") and not self._data

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None  # comments, `event`, `id` and `retry` are not measured


@attrs.define(eq=False)
class AnswerReader:
    started_s: float
    _on_piece: Callable[[Piece], object] | None = None
    _events: EventReader = attrs.field(factory=EventReader)
    _times_s: list[float] = attrs.field(factory=list)
    _texts: list[str] = attrs.field(factory=list)
    _usage: ReportedUsage = ReportedUsage()
    _failure: Failure | None = None
    _finish_reason: str | None = None
    _finished_s: float | None = None
    _done_s: float | None = None
    has_begun: bool = False
    """Some of the body has arrived."""

    @property
    def is_done(self) -> bool:
        """Whether `[DONE]`, or an error in its place, has arrived: the rest is ignored."""
        return self._done_s is not None

    def feed(self, received: bytes, now_s: float) -> None:
        self.has_begun = True
        for data in self._events.feed(received):
            if self.is_done:
                return
            if data.strip() == DONE:
                self._done_s = now_s
            elif data:  # an empty one is only a keep-alive
                self._take(data, now_s)

    def end(self, now_s: float, failure: Failure | None = None) -> Outcome:
        """Return the outcome. `failure` is what ended the stream, and counts unless the stream was done."""
        saw_done = self.is_done and self._failure is None
        if not self.is_done:
            self._failure = failure
            if failure is None and not (self._finish_reason is not None and self._events.is_between):
                self._failure = Failure("stream_ended_early", "the stream ended without a finish reason or [DONE]")
        return Outcome(
            started_s=self.started_s,
            ended_s=now_s if self._done_s is None else self._done_s,
            output_at_s=tuple(self._times_s),
            text="".join(self._texts),
            usage=self._usage,
            failure=self._failure,
            saw_done=saw_done,
            finish_reason=self._finish_reason,
            finished_s=self._finished_s,
        )

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("bad_event", f"{error}: {data[:MAX_MESSAGE].decode('utf-8', 'replace')}", now_s)
            return
        if chunk.error is not None:
            self._fail("error_event", message_of(chunk.error), now_s)
            return
        num_outputs = sum(self._take_choice(choice) for choice in chunk.choices or ())
        if num_outputs:
            self._times_s.append(now_s)
        if self._finished_s is None and self._finish_reason is not None:
            self._finished_s = now_s
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._usage = ReportedUsage(
                prompt_tokens=_count(chunk.usage.prompt_tokens),
                completion_tokens=_count(chunk.usage.completion_tokens),
                cached_tokens=_count(details.cached_tokens) if details is not None else None,
            )

    def _take_choice(self, choice: _Choice) -> bool:
        """Return whether the choice carried output."""
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        delta = choice.delta
        thought = (delta.reasoning_content or delta.reasoning) if delta is not None else None
        if thought and self._on_piece is not None:
            self._on_piece(Piece(thought, is_reasoning=True))
        text = choice.text or (delta.content if delta is not None else None)
        if text:
            self._texts.append(text)
            if self._on_piece is not None:
                self._on_piece(Piece(text))
            return True
        return delta is not None and bool(thought or delta.refusal or delta.tool_calls)

    def _fail(self, kind: str, message: str, now_s: float) -> None:
        self._failure = Failure(kind, message[:MAX_MESSAGE])
        self._done_s = now_s


def message_of(error: Any) -> str:
    """Return the message of an error object of the OpenAI API, or of whatever a server sends in its place."""
    while isinstance(error, dict):
        inner = error.get("error", error.get("message"))
        if inner is None:
            break
        error = inner
    return str(error)[:MAX_MESSAGE]


def _count(value: int | None) -> int | None:
    """Return None for the -1 that some servers send for unknown counts."""
    return None if value is None or value < 0 else value
