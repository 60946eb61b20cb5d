"""Reads a response or a stream, from bytes to an exchange, whatever a server sends.

Nothing here raises for what a server has sent, and nothing grows beyond `MAX_BYTES`: a body or a line that is too
long, too many reads, and events that are no JSON end the reading, and the exchange says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import orjson

from ..bench.answer import DONE, EventReader, message_of
from ..command_output import printable
from .exchange import Ask, Exchange, Failure
from .said_usage import Said, usages_of

MAX_BYTES = 4 << 20
MAX_LINE = 256 << 10
MAX_READS = 5000
MAX_EVENTS = 5000
MAX_USAGES = 1000
_MAX_MESSAGE = 200
_LAST_EVENTS = {
    "response.completed", "response.incomplete", "response.failed", "message_stop",
}  # fmt: skip


@attrs.define(eq=False)
class AnswerReader:
    """Takes the bytes of one response with the times of their arrival."""

    ask: Ask
    started_s: float
    is_done: bool = False
    """The stream has said that it has ended: what follows is only waited for briefly."""
    first_output_s: float | None = None
    failure: Failure | None = None
    _events: EventReader = attrs.field(factory=EventReader)
    _usages: list[tuple[str, Said]] = attrs.field(factory=list)
    _body: bytearray = attrs.field(factory=bytearray)
    _num_bytes: int = 0
    _num_reads: int = 0
    _num_events: int = 0
    _in_line: int = 0
    _choices: set[int] = attrs.field(factory=set)
    _num_bare_outputs: int = 0

    def feed(self, received: bytes, now_s: float) -> bool:
        """Take some bytes; return whether more are wanted."""
        self._num_bytes += len(received)
        self._num_reads += 1
        if self._num_bytes > MAX_BYTES or self._num_reads > MAX_READS:
            self.failure = Failure("too_large", f"no end after {self._num_bytes} bytes in {self._num_reads} reads")
            return False
        if not self.ask.is_stream:
            self._body += received
            return True
        self._in_line = self._in_line + len(received) if b"\n" not in received else len(received)
        if self._in_line > MAX_LINE:
            self.failure = Failure("too_large", f"a line of more than {MAX_LINE} bytes")
            return False
        for data in self._events.feed(received):
            self._num_events += 1
            if self._num_events > MAX_EVENTS:
                self.failure = Failure("too_large", f"more than {MAX_EVENTS} events")
                return False
            if data.strip() == DONE:
                self.is_done = True
            elif data:
                self._take_event(data, now_s)
            if self.failure is not None:
                return False
        return not (self.ask.leaves and self.first_output_s is not None)

    def end(self, now_s: float, failure: Failure | None = None, ignored: str = "") -> Exchange:
        """Return the exchange. `failure` is what ended the reading, and does not count once the stream was done."""
        if failure is None or self.is_done:
            failure = None if self._has_left() else self.failure
            if failure is None and not self._has_left():
                failure = self._finish()
        return Exchange(
            ask=self.ask,
            failure=failure,
            usages=tuple(self._usages),
            num_bare_outputs=self._num_bare_outputs,
            num_choices=len(self._choices),
            took_s=now_s - self.started_s,
            first_output_s=self.first_output_s,
            ignored=printable(ignored)[:_MAX_MESSAGE],
        )

    def _has_left(self) -> bool:
        return self.ask.leaves and self.first_output_s is not None

    def _finish(self) -> Failure | None:
        if self.ask.is_stream:
            is_empty = self.first_output_s is None and not self._usages and not self.is_done
            return Failure("empty_stream", "the stream ended without output, usage or [DONE]") if is_empty else None
        payload, failure = _decode(bytes(self._body))
        if failure is None:
            self._take(payload)
            if not isinstance(payload, Mapping) or not (self._choices or self._usages):
                failure = Failure("no_answer", "neither choices nor usage in the response")
        return failure

    def _take_event(self, data: bytes, now_s: float) -> None:
        payload, self.failure = _decode(data)
        if self.failure is not None or not isinstance(payload, Mapping):
            return
        if payload.get("error") is not None and not payload.get("choices"):
            self.failure = Failure("error_event", _text_of(payload["error"]))
            return
        kind, num_usages = payload.get("type"), len(self._usages)
        self.is_done = self.is_done or (isinstance(kind, str) and kind in _LAST_EVENTS)
        self._take(payload)
        if self._has_output(payload):
            self._num_bare_outputs += len(self._usages) == num_usages
            if self.first_output_s is None:
                self.first_output_s = now_s - self.started_s

    def _take(self, payload: Any) -> None:
        if len(self._usages) < MAX_USAGES:
            self._usages += usages_of(self.ask.api, payload)
        choices = payload.get("choices") if isinstance(payload, Mapping) else None
        if isinstance(choices, list):
            for place, choice in enumerate(choices[:100]):
                index = choice.get("index", place) if isinstance(choice, Mapping) else place
                self._choices.add(index if type(index) is int else place)

    def _has_output(self, payload: Mapping[str, Any]) -> bool:
        """Return whether an event has output: a chunk that only names the role may come before anything is computed."""
        kind = payload.get("type")
        if self.ask.api in ("responses", "messages"):
            return isinstance(kind, str) and ("delta" in kind or kind in _LAST_EVENTS)
        choices = payload.get("choices")
        return isinstance(choices, list) and any(map(_is_output, choices))


def _is_output(choice: Any) -> bool:
    if not isinstance(choice, Mapping):
        return False
    if choice.get("text") or choice.get("finish_reason"):
        return True
    delta = choice.get("delta")
    names = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return isinstance(delta, Mapping) and any(delta.get(name) for name in names)


def _text_of(error: Any) -> str:
    try:
        return printable(message_of(error))[:_MAX_MESSAGE]
    except RecursionError:  # it may be nested a thousand times
        return "an error that is nested too deep"


def _decode(data: bytes) -> tuple[Any, Failure | None]:
    try:
        return orjson.loads(data), None
    except orjson.JSONDecodeError as error:
        shown = printable(data[:80].decode("utf-8", "replace"))
        return None, Failure("not_json", f"{error}: {shown}"[:_MAX_MESSAGE])
