"""Turns an upstream's response into the client's response, and finds the usage to record.

A `StreamRelay` takes a stream as it arrives, a `WholeRelay` a response in one piece. Pure: `actor.py` reads and sends.

    upstream's bytes ──feed──▶ bytes for the client, at once            last ──▶ sent when the record is stored

What must always hold: the client gets the upstream's response byte for byte, except for usage that it did not ask for;
the last bytes are held back; nothing grows with a response beyond a named bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import msgspec

from ...messages.counts import UNKNOWN
from ...messages.outcomes import FinishReason
from ...messages.upstream import Forward, UpstreamUsage
from .answers import MAX_CHOICES, Answer, Choice, parse_answer, with_usage, without_usage
from .event_stream import Comment, EventSplitter, UpstreamGarbage
from .json_members import CannotReplace, Member
from .upstream_usage import read_usage, told_usage

MAX_WHOLE_BYTES = 8 << 20
"""Maximum size of a response in one piece. It is parsed at once, in 2 to 30 ms; a longer one has to be streamed."""
DONE = b"[DONE]"
_NO_USAGE = b',"usage":null}'
MAX_INDEX = 2**31
"""Choices with larger indexes are ignored."""


class _OtherReason:
    """A finish reason that records do not know."""


_OTHER = _OtherReason()
_REASONS = {
    **dict.fromkeys(("length", "max_tokens"), FinishReason.LENGTH),
    **dict.fromkeys(("stop", "tool_calls", "function_call", "eos", "stop_sequence"), FinishReason.STOP),
}


@attrs.define
class Ends:
    """The finish reasons of a response's choices."""

    reasons: dict[int, FinishReason | _OtherReason | None] = attrs.field(factory=dict)
    """Reasons by choice; None until it ends. The upstream's own text is not kept, since it may be long."""

    def note(self, choices: list[Choice] | None) -> None:
        for choice in choices or ():
            index = choice.index or 0
            if index in self.reasons or (len(self.reasons) < MAX_CHOICES and 0 <= index < MAX_INDEX):
                said = choice.finish_reason
                self.reasons[index] = _REASONS.get(said, _OTHER) if said else self.reasons.get(index)

    @property
    def num_choices(self) -> int:
        return len(self.reasons)

    @property
    def one_has_ended(self) -> bool:
        return any(reason is not None for reason in self.reasons.values())

    @property
    def all_have_ended(self) -> bool:
        return bool(self.reasons) and None not in self.reasons.values()

    @property
    def finish_reason(self) -> FinishReason | None:
        """The first choice's reason, if records know it."""
        reason = self.reasons.get(0)
        return reason if isinstance(reason, FinishReason) else None


class StreamRelay:
    """Relays a stream."""

    def __init__(self, forward: Forward, estimate: int | None, *, hides_chunk_usage: bool = False) -> None:
        """`hides_chunk_usage`: usage in chunks with choices was asked for by this server, not by its client."""
        self.ends = Ends()
        self.usage = UpstreamUsage()
        """The last reported usage."""
        self.is_done = False
        """Whether the upstream has sent the end of its stream."""
        self.has_begun = False
        """Whether the client has been sent anything but comments."""
        self._hides_chunk_usage = hides_chunk_usage
        self._has_one_choice = forward.has_one_choice
        self._shows_usage = forward.shows_usage
        self._estimate = estimate if forward.asks_details else None
        self._events = EventSplitter()
        self._held: list[bytes] = []
        """The final usage, until it is known that nothing follows."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send to the client now. Raises UpstreamGarbage."""
        return b"".join(part for event in self._events.feed(data) for part in self._take(event))

    def end(self) -> bytes:
        """Return the last bytes to send to the client. Raises UpstreamGarbage if the response is incomplete."""
        rest = b"".join(part for event in self._events.rest() for part in self._take(event))
        if not (self.ends.one_has_ended if self.is_done else self.ends.all_have_ended):
            raise UpstreamGarbage("the end of its response before it was complete")
        self.has_begun = True
        return rest + b"".join(self._held) + b"data: [DONE]\n\n"

    def _take(self, event: bytes) -> list[bytes]:
        """Return the parts of an event to send to the client, preceded by those that were held back."""
        if self.is_done:
            return []
        if isinstance(event, Comment):
            return [event, b"\n\n"]
        if event == DONE:
            self.is_done = True
            return []
        answer = parse_answer(event)
        if answer.says_error:
            raise UpstreamFailure(event)
        self.ends.note(answer.choices)
        if answer.says_usage:
            self.usage = read_usage(answer.said())
            if answer.choices and not self._has_one_choice:
                # some servers report only the usage of the chunk's own choice
                self.usage = attrs.evolve(self.usage, completion=UNKNOWN, reasoning_tokens=0)
            if not answer.choices:
                held, self._held = self._held, [self._framed(event, answer)] if self._shows_usage else []
                return held
        held, self._held = self._held, []
        self.has_begun = True
        return [*held, self._framed(event, answer)]

    def _framed(self, event: bytes, answer: Answer) -> bytes:
        if answer.usage is msgspec.UNSET:
            return b"data: " + event + b"\n\n"
        if self._hides_chunk_usage and answer.choices and self._shows_usage and answer.says_usage:
            return b"data: " + with_usage(event, None) + b"\n\n"
        if self._shows_usage:
            return b"data: " + _with_told(event, answer.said(), self.usage, self._estimate) + b"\n\n"
        if event.endswith(_NO_USAGE):
            return b"data: " + event[: -len(_NO_USAGE)] + b"}\n\n"
        return b"data: " + without_usage(event) + b"\n\n"


class WholeRelay:
    """Relays a response in one piece, like a `StreamRelay` that sends everything at the end."""

    is_done = False
    has_begun = False

    def __init__(self, forward: Forward, estimate: int | None) -> None:
        self.ends = Ends()
        self.usage = UpstreamUsage()
        self._estimate = estimate if forward.asks_details else None
        self._body = bytearray()

    def feed(self, data: bytes) -> bytes:
        self._body += data
        if len(self._body) > MAX_WHOLE_BYTES:
            raise UpstreamGarbage(f"a response of more than {MAX_WHOLE_BYTES} bytes that is not streamed")
        return b""

    def end(self) -> bytes:
        body = bytes(self._body)
        answer = parse_answer(body)
        if answer.says_error:
            raise UpstreamGarbage("an error with the status of a success")
        self.ends.note(answer.choices)
        if not self.ends.num_choices:
            raise UpstreamGarbage("a response without choices")
        if not answer.says_usage:
            return body
        said = answer.said()
        self.usage = read_usage(said)
        return _with_told(body, said, self.usage, self._estimate)


Relay = StreamRelay | WholeRelay


@contextmanager
def reading() -> Iterator[None]:
    """Turn any error in the block, which reads an upstream's bytes, into a fault of that upstream."""
    try:
        yield
    except (UpstreamGarbage, UpstreamFailure):
        raise
    except Exception as error:
        raise UpstreamGarbage(f"what cannot be read ({type(error).__name__})") from error


class UpstreamFailure(Exception):
    """An upstream has reported a failure in its stream. The argument is the event, for the client."""

    def __init__(self, event: bytes) -> None:
        super().__init__("an error in its stream")
        self.event = event


def _with_told(data: bytes, said: object, usage: UpstreamUsage, estimate: int | None) -> bytes:
    """Return a response with the usage that the client is told."""
    if not isinstance(said, dict):
        return data if said is None else with_usage(data, None)
    told = told_usage(said, usage, estimate)
    return data if told == said else with_usage(data, told)


_model, _stream_options = Member("model"), Member("stream_options")
_include_usage, _continuous_usage = Member("include_usage"), Member("continuous_usage_stats")


def body_for(forward: Forward, model: str, *, is_continuous: bool = False) -> bytes:
    """Return a request's body for an upstream: with its own `model`, and asking for usage at the end of a stream.

    `is_continuous`: ask for usage in every chunk, too. Raises UpstreamGarbage for a body that cannot be changed.
    """
    body = forward.body
    try:
        if model != forward.model:
            body = _model.replace(body, msgspec.json.encode(model))
        wanted = [] if forward.asks_usage else [_include_usage]
        wanted += [_continuous_usage] if is_continuous and not forward.asks_continuous else []
        if forward.is_stream and wanted:
            options = (_stream_options.value(body) if forward.has_stream_options else None) or b"null"
            for flag in wanted:
                options = flag.added_to(options, b"true")
            if forward.has_stream_options:
                body = _stream_options.replace(body, options)
            else:
                body = b'{"stream_options":' + options + b"," + body[body.index(b"{") + 1 :]
    except (CannotReplace, msgspec.DecodeError, RecursionError):
        raise UpstreamGarbage("nothing, since the request cannot be changed for it") from None
    return body
