"""What a choice consists of: blocks of text, reasoning and tool calls, in the order in which the model wrote them.

Whole responses are rendered from a `Content`, streams from the same events one by one, as `shown_events` returns them.

What must always hold: the events of any sequence, also one that ends within a call, can be added; blocks that follow
each other differ in kind, except for calls; a delimiter is in no block.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence

import attrs

from quipu.actors.messages.output import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Markup,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)

MAX_LOOSE_PIECES = 256
"""Pieces of a text that are kept before they are joined: short strings take more than ten times their bytes."""
_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS, _NUM_SHORT_ID_CHARS = 24, 9


class GrowingText:
    __slots__ = ("_pieces",)

    def __init__(self, text: str = "") -> None:
        self._pieces = [text]

    def __str__(self) -> str:
        return "".join(self._pieces)

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def append(self, piece: str) -> None:
        pieces = self._pieces
        pieces.append(piece)
        if len(pieces) > MAX_LOOSE_PIECES:
            # The first stays apart, so that a long text is not copied again and again.
            pieces[1:] = ["".join(pieces[1:])]
            if len(pieces[1]) > len(pieces[0]):
                pieces[:] = ["".join(pieces)]


@attrs.define(eq=False)
class TextBlock:
    text: GrowingText


@attrs.define(eq=False)
class ReasoningBlock:
    text: GrowingText


@attrs.define(eq=False)
class CallBlock:
    index: int
    """Calls of a choice are counted from 0."""
    name: str
    text: GrowingText
    """The arguments, as the model wrote them: JSON, unless the model erred or was cut."""
    is_complete: bool = False


Block = TextBlock | ReasoningBlock | CallBlock


@attrs.define(eq=False)
class Content:
    """The blocks of one choice so far."""

    blocks: list[Block] = attrs.field(factory=list)

    def add_text(self, text: str) -> None:
        if text:
            self._extend(TextBlock, text)

    def add(self, event: OutputEvent) -> None:
        """Add one of the events that `shown_events` returns."""
        match event:
            case TextDelta():
                self._extend(TextBlock, event.text)
            case ReasoningDelta():
                self._extend(ReasoningBlock, event.text)
            case CallBegin():
                self.blocks.append(CallBlock(event.index, event.name, GrowingText()))
            case ArgumentsDelta() if (call := self._open_call()) is not None:
                call.text.append(event.text)
            case CallEnd() if (call := self._open_call()) is not None:
                call.is_complete = True

    def _extend(self, kind: type[TextBlock | ReasoningBlock], text: str) -> None:
        if self.blocks and type(self.blocks[-1]) is kind:
            self.blocks[-1].text.append(text)
        else:
            self.blocks.append(kind(GrowingText(text)))

    def _open_call(self) -> CallBlock | None:
        last = self.blocks[-1] if self.blocks else None
        return last if isinstance(last, CallBlock) and not last.is_complete else None

    @property
    def text(self) -> str:
        return "".join(str(block.text) for block in self.blocks if isinstance(block, TextBlock))

    @property
    def reasoning(self) -> str:
        return "".join(str(block.text) for block in self.blocks if isinstance(block, ReasoningBlock))

    @property
    def calls(self) -> list[CallBlock]:
        return [block for block in self.blocks if isinstance(block, CallBlock)]

    @property
    def has_complete_call(self) -> bool:
        return any(isinstance(block, CallBlock) and block.is_complete for block in self.blocks)


def shown_events(events: Sequence[OutputEvent], *, with_reasoning: bool) -> Sequence[OutputEvent]:
    """Return what a client is shown of a delta's events: no delimiters, and adjacent texts of a kind as one."""
    if len(events) == 1 and isinstance(events[0], TextDelta):  # the hot path
        return events if events[0].text else ()
    shown: list[OutputEvent] = []
    for event in events:
        if isinstance(event, Markup) or (isinstance(event, ReasoningDelta) and not with_reasoning):
            continue
        if isinstance(event, (TextDelta, ReasoningDelta, ArgumentsDelta)):
            if not event.text:
                continue
            joined = _join(shown[-1], event) if shown else None
            if joined is not None:
                shown[-1] = joined
                continue
        shown.append(event)
    return shown


def _join(first: OutputEvent, second: OutputEvent) -> OutputEvent | None:
    """Return one event for two texts of a kind, None for any others."""
    match first, second:
        case TextDelta(), TextDelta():
            return TextDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case ArgumentsDelta(), ArgumentsDelta() if first.index == second.index:
            return ArgumentsDelta(first.index, first.text + second.text)
    return None


@attrs.frozen
class CallIds:
    """Ids of one request's calls, which no two calls share."""

    request_id: str
    are_short: bool = False
    """Nine letters and digits, the only ids that some chat templates accept."""

    def call_id(self, prefix: str, choice: int, call: int) -> str:
        """Return the id of a choice's call, under the prefix of its API unless ids are short."""
        letters = opaque_text(f"{self.request_id} {choice} {call}")
        return letters[:_NUM_SHORT_ID_CHARS] if self.are_short else prefix + letters


def opaque_text(source: str) -> str:
    """Return 24 letters and digits that follow from `source`."""
    digest = hashlib.sha256(source.encode()).digest()
    return "".join(_ID_CHARS[byte % len(_ID_CHARS)] for byte in digest[:_NUM_ID_CHARS])
