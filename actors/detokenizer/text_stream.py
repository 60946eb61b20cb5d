"""From token ids to text, piece by piece: incremental decoding and stop strings (`stop_strings.py`).

Used by the detokenizer, with one `TextStream` per sequence. What must always hold: the pieces concatenated are the
whole text, cut where a stop string begins; no piece contains text that may still turn out to be part of a stop string
or of an incomplete character.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import msgspec

from ..messages.output import OutputEvent, TextDelta
from ..shared.token_decoding import TokenDecoder
from .stop_strings import ROOT, StopStrings


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one token released."""

    text: str
    match: str | None = None
    """The stop string that is complete."""
    is_complete: bool = False
    """Nothing after this is released."""
    events: tuple[OutputEvent, ...] = ()
    """What was released, in order, if it is not all text; `text` is empty then."""

    def joined(self, rest: Piece) -> Piece:
        """Return this piece, which is not complete, and what was released after it."""
        if not self.events and not rest.events:
            return Piece(self.text + rest.text, rest.match, rest.is_complete)
        return Piece("", rest.match, rest.is_complete, (*self._as_events(), *rest._as_events()))

    def _as_events(self) -> tuple[OutputEvent, ...]:
        return (TextDelta(self.text),) if self.text else self.events


NOTHING = Piece("")


class StopMatcher:
    """Hold back text while it could be the beginning of a stop string."""

    __slots__ = ("_ignores", "_include", "_node", "_num_held", "_num_ignored", "_num_ignored_chars", "_stops")

    def __init__(self, stops: StopStrings | None, *, include: bool = False, num_ignored: int = 0) -> None:
        """`stops` may be shared with other matchers; None: there are none. `include` releases the stop string, too.

        Stop strings that complete within the first `num_ignored` tokens are ignored.
        """
        self._stops = stops
        self._include = include
        self._node = ROOT
        """The node whose prefix is held back."""
        self._num_held = 0
        self._num_ignored = num_ignored
        self._ignores = False
        self._num_ignored_chars = 0  # of those held back: stop strings that complete within them are ignored

    def push(self, text: str, *, is_new_token: bool = True) -> Piece:
        """Search more text: that of the next token, or more of the same one's."""
        stops = self._stops
        if stops is None:
            return Piece(text)
        before, num_held = self._node, self._num_held
        if is_new_token:
            self._ignores = self._num_ignored > 0
            self._num_ignored -= self._ignores
        if self._ignores:
            self._num_ignored_chars = num_held + len(text)
        ignored, node, step = self._num_ignored_chars, before, stops.step
        for end, character in enumerate(text, num_held + 1):
            node = step(node, character)
            # the stop string that completes first; of several, the one that begins first
            if node != ROOT and end > ignored and (match := stops.ended_at(node)) is not None:
                self._node, self._num_held = ROOT, 0
                shown = self._first(before, text, end if self._include else end - len(match))
                return Piece(shown, match, is_complete=True)
        self._node = stops.unfinished(node)
        self._num_held = stops.depth(self._node)
        num_out = num_held + len(text) - self._num_held
        self._num_ignored_chars = max(0, ignored - num_out)
        return Piece(self._first(before, text, num_out))

    def _first(self, before: int, text: str, count: int) -> str:
        """Return the first `count` characters of the held text followed by `text`."""
        if not count or self._stops is None:
            return ""
        return self._stops.prefix(before, count) + text[: max(0, count - self._stops.depth(before))]

    def flush(self) -> str:
        """Release the text that was held back and did not become a stop string."""
        if self._stops is None:
            return ""
        held = self._stops.prefix(self._node, self._num_held)
        self._node, self._num_held = ROOT, 0
        return held


@attrs.define(eq=False)
class TextStream:
    """One sequence's text: decoded, then searched for stop strings."""

    _decoder: TokenDecoder
    _matcher: StopMatcher
    num_reasoning_tokens: ClassVar = 0

    def push(self, token_id: int) -> Piece:
        return self._matcher.push(self._decoder.push(token_id))

    def push_hidden(self, token_id: int) -> Piece:
        """Take the token that ends the output and is not shown."""
        return NOTHING

    def flush(self) -> Piece:
        """Release everything at the end. Even an incomplete character can complete a stop string."""
        piece = self._matcher.push(self._decoder.flush())
        return piece if piece.is_complete else Piece(piece.text + self._matcher.flush())
