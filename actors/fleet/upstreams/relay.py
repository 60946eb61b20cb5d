"""What becomes of an upstream's response: what its client is sent of it, and what is booked.

A `StreamRelay` takes a stream as it comes, a `WholeRelay` a response in one piece. Pure: `actor.py` reads and sends.

    upstream's bytes ──feed──▶ bytes for the client, at once            last ──▶ sent when the record is stored

What must always hold: what the client gets is what the upstream sent, byte for byte, but for usage that it did not ask
for; the last bytes are held back; nothing here grows with a response but what is bounded by name.
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
"""A response in one piece. It is read at once, which takes 2 to 30 ms; a longer one has to be streamed."""
DONE = b"[DONE]"
_NO_USAGE = b',"usage":null}'
MAX_INDEX = 2**31
"""Choices of larger indexes are passed over."""


class _OtherReason:
    """Why a choice has ended, in words that a record does not know."""


_OTHER = _OtherReason()
_REASONS = {
    **dict.fromkeys(("length", "max_tokens"), FinishReason.LENGTH),
    **dict.fromkeys(("stop", "tool_calls", "function_call", "eos", "stop_sequence"), FinishReason.STOP),
}


@attrs.define
class Ends:
    """How the choices of a response have ended."""

    reasons: dict[int, FinishReason | _OtherReason | None] = attrs.field(factory=dict)
    """By choice. None: it has not ended. What an upstream says is not kept, since it may be long."""

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
        """The first choice's, if a record knows it."""
        reason = self.reasons.get(0)
        return reason if isinstance(reason, FinishReason) else None


class StreamRelay:
    """What becomes of a stream."""

    def __init__(self, forward: Forward, estimate: int | None, *, hides_chunk_usage: bool = False) -> None:
        """`hides_chunk_usage`: usage in chunks with choices was asked for by this server, not by its client."""
        self.ends = Ends()
        self.usage = UpstreamUsage()
        """What was said last."""
        self.is_done = False
        """The upstream has said that it is done."""
        self.has_begun = False
        """Anything but comments is sent to the client."""
        self._hides_chunk_usage = hides_chunk_usage
        self._has_one_choice = forward.has_one_choice
        self._shows_usage = forward.shows_usage
        self._estimate = estimate if forward.asks_details else None
        self._events = EventSplitter()
        self._held: list[bytes] = []
        """The usage at the end, until it is known that nothing follows."""

    def feed(self, data: bytes) -> bytes:
        """Return what the client is sent now. Raises UpstreamGarbage."""
        return b"".join(part for event in self._events.feed(data) for part in self._take(event))

    def end(self) -> bytes:
        """Return what the client is sent last. Raises UpstreamGarbage if there should have been more."""
        rest = b"".join(part for event in self._events.rest() for part in self._take(event))
        if not (self.ends.one_has_ended if self.is_done else self.ends.all_have_ended):
            raise UpstreamGarbage("the end of its response before it was complete")
        self.has_begun = True
        return rest + b"".join(self._held) + b"data: [DONE]\n\n"

    def _take(self, event: bytes) -> list[bytes]:
        """Return what the client is sent of an event, and of what was held back before it."""
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
                # some servers say only what the chunk's own choice has used
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
    """What becomes of a response in one piece: as a `StreamRelay` that sends everything last."""

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
    """Raise whatever is raised in the block, in which an upstream's bytes are read, as that upstream's fault."""
    try:
        yield
    except (UpstreamGarbage, UpstreamFailure):
        raise
    except Exception as error:
        raise UpstreamGarbage(f"what cannot be read ({type(error).__name__})") from error


class UpstreamFailure(Exception):
    """An upstream says in its stream that it has failed. The argument is the event, for the client."""

    def __init__(self, event: bytes) -> None:
        super().__init__("an error in its stream")
        self.event = event


def _with_told(data: bytes, said: object, usage: UpstreamUsage, estimate: int | None) -> bytes:
    """Return a response with its usage as the client is told it."""
    if not isinstance(said, dict):
        return data if said is None else with_usage(data, None)
    told = told_usage(said, usage, estimate)
    return data if told == said else with_usage(data, told)


_model, _stream_options = Member("model"), Member("stream_options")
_include_usage, _continuous_usage = Member("include_usage"), Member("continuous_usage_stats")


def body_for(forward: Forward, model: str, *, is_continuous: bool = False) -> bytes:
    """Return a request's body as an upstream gets it: with usage at the end of a stream, and with its own `model`.

    `is_continuous`: with usage in every chunk as well. Raises UpstreamGarbage for a body that cannot be changed.
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
