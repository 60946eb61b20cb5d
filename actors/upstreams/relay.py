"""What becomes of an upstream's response: what its client is sent of it, and what is booked.

A `StreamRelay` takes a stream as it comes, a `WholeRelay` a response in one piece. Pure: `actor.py` reads and sends.

    upstream's bytes ──feed──▶ bytes for the client, at once            last ──▶ sent when the record is stored

What must always hold: what the client gets is what the upstream sent, byte for byte, but for usage that it did not ask
for; the last bytes are held back; nothing here grows with a response but what is bounded by name.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import msgspec

from ..messages.outcomes import FinishReason
from ..messages.upstream import ForeignUsage, Forward
from .event_stream import EventSplitter, UpstreamGarbage
from .foreign_usage import read_usage, told_usage

MAX_WHOLE_BYTES = 8 << 20
"""A response in one piece. It is parsed at once, which takes 2 to 30 ms; a longer one has to be streamed."""
MAX_CHOICES = 1024
"""Choices of one response whose ends are kept apart."""
DONE = b"[DONE]"
_NO_USAGE = b',"usage":null}'
_LENGTHS = {"length": FinishReason.LENGTH, "max_tokens": FinishReason.LENGTH}
_STOPS = frozenset({"stop", "tool_calls", "function_call", "eos", "stop_sequence"})


class _Choice(msgspec.Struct):
    index: int | None = 0
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """A chunk, or a whole response: what has to be known of it."""

    choices: list[_Choice] | None = None
    usage: Any = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_answers = msgspec.json.Decoder(_Answer)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Relay(Protocol):
    @property
    def ends(self) -> Ends: ...

    @property
    def usage(self) -> ForeignUsage:
        """What was said last."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the upstream has said that it is done."""
        ...

    def feed(self, data: bytes) -> bytes:
        """Return what the client is sent now. Raises UpstreamGarbage."""
        ...

    def end(self) -> bytes:
        """Return what the client is sent last. Raises UpstreamGarbage if there should have been more."""
        ...


@attrs.define
class Ends:
    """How the choices of a response have ended."""

    reasons: dict[int, str | None] = attrs.field(factory=dict)

    def note(self, choices: list[_Choice] | None) -> None:
        for choice in choices or ():
            index = choice.index or 0
            if index in self.reasons or len(self.reasons) < MAX_CHOICES:
                self.reasons[index] = choice.finish_reason or self.reasons.get(index)

    @property
    def num_choices(self) -> int:
        return len(self.reasons)

    @property
    def all_have_ended(self) -> bool:
        return bool(self.reasons) and None not in self.reasons.values()

    @property
    def finish_reason(self) -> FinishReason | None:
        """The first choice's, if a record knows it."""
        said = self.reasons.get(0)
        return _LENGTHS.get(said or "", FinishReason.STOP if said in _STOPS else None)


class StreamRelay:
    def __init__(self, forward: Forward, estimate: int | None) -> None:
        self.ends = Ends()
        self.usage = ForeignUsage()
        self.is_done = False
        self._shows_usage = forward.shows_usage
        self._estimate = estimate if forward.asks_details else None
        self._events = EventSplitter()
        self._held: list[bytes] = []
        """The usage at the end, until it is known that nothing follows."""

    def feed(self, data: bytes) -> bytes:
        return b"".join(part for event in self._events.feed(data) for part in self._take(event))

    def end(self) -> bytes:
        rest = b"".join(part for event in self._events.rest() for part in self._take(event))
        if not (self.is_done or self.ends.all_have_ended):
            raise UpstreamGarbage("the end of its response before it was complete")
        return rest + b"".join(self._held) + b"data: [DONE]\n\n"

    def _take(self, event: bytes) -> list[bytes]:
        """Return what the client is sent of an event, and of what was held back before it."""
        if self.is_done:
            return []
        if event == DONE:
            self.is_done = True
            return []
        answer = _parse(event)
        if answer.error is not msgspec.UNSET:
            raise UpstreamFailure(event)
        self.ends.note(answer.choices)
        if answer.usage is not None and answer.usage is not msgspec.UNSET:
            self.usage = read_usage(answer.usage)
            if not answer.choices:
                held, self._held = self._held, [self._framed(event, answer)] if self._shows_usage else []
                return held
        held, self._held = self._held, []
        return [*held, self._framed(event, answer)]

    def _framed(self, event: bytes, answer: _Answer) -> bytes:
        if answer.usage is msgspec.UNSET:
            return b"data: " + event + b"\n\n"
        if self._shows_usage:
            return b"data: " + _with_told(event, answer.usage, self.usage, self._estimate) + b"\n\n"
        if answer.usage is None and event.endswith(_NO_USAGE):
            return b"data: " + event[: -len(_NO_USAGE)] + b"}\n\n"
        return b"data: " + _without_usage(event) + b"\n\n"


class WholeRelay:
    is_done = False

    def __init__(self, forward: Forward, estimate: int | None) -> None:
        self.ends = Ends()
        self.usage = ForeignUsage()
        self._estimate = estimate if forward.asks_details else None
        self._body = bytearray()

    def feed(self, data: bytes) -> bytes:
        self._body += data
        if len(self._body) > MAX_WHOLE_BYTES:
            raise UpstreamGarbage(f"a response of more than {MAX_WHOLE_BYTES} bytes that is not streamed")
        return b""

    def end(self) -> bytes:
        body = bytes(self._body)
        answer = _parse(body)
        if answer.error is not msgspec.UNSET:
            raise UpstreamGarbage("an error with the status of a success")
        self.ends.note(answer.choices)
        if answer.usage is msgspec.UNSET or answer.usage is None:
            return body
        self.usage = read_usage(answer.usage)
        return _with_told(body, answer.usage, self.usage, self._estimate)


class UpstreamFailure(Exception):
    """An upstream says in its stream that it has failed. The argument is the event, for the client."""

    def __init__(self, event: bytes) -> None:
        super().__init__("an error in its stream")
        self.event = event


def _parse(data: bytes) -> _Answer:
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise UpstreamGarbage("what is no response of the OpenAI API") from None


def _with_told(data: bytes, said: object, usage: ForeignUsage, estimate: int | None) -> bytes:
    """Return a response with its usage as the client is told it."""
    if not isinstance(said, dict):
        return data if said is None else _replaced(data, {"usage": None})
    told = told_usage(said, usage, estimate)
    return data if told == said else _replaced(data, {"usage": told})


def _without_usage(data: bytes) -> bytes:
    members = _members.decode(data)
    del members["usage"]
    return msgspec.json.encode(members)


def _replaced(data: bytes, values: dict[str, object]) -> bytes:
    """Return an object with other members; those that stay keep every byte of their values."""
    return msgspec.json.encode({**_members.decode(data), **values})


def body_for(forward: Forward, model: str) -> bytes:
    """Return a request's body as an upstream gets it: with usage at the end of a stream, and with its own `model`.

    Raises UpstreamGarbage for a body that cannot be changed.
    """
    body = forward.body
    adds_usage = forward.is_stream and not forward.asks_usage
    values: dict[str, object] = {} if model == forward.model else {"model": model}
    try:
        if adds_usage and forward.has_stream_options:
            options: Any = msgspec.json.decode(_members.decode(body)["stream_options"]) or {}
            values["stream_options"] = {**options, "include_usage": True}
        body = _replaced(body, values) if values else body
    except (msgspec.DecodeError, RecursionError):
        raise UpstreamGarbage("nothing, since the request cannot be changed for it") from None
    if adds_usage and not forward.has_stream_options:
        body = b'{"stream_options":{"include_usage":true},' + body[body.index(b"{") + 1 :]
    return body
