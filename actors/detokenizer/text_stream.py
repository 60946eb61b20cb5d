"""From token ids to text, piece by piece: incremental decoding and stop strings (`stop_strings.py`).

Used by the detokenizer, with one `TextStream` per sequence. What must always hold: the pieces concatenated are the
whole text, cut where a stop string begins; no piece contains text that may still turn out to be part of a stop string
or of an incomplete character.
"""

from __future__ import annotations

import msgspec

from ..shared.token_decoding import TokenDecoder
from .stop_strings import ROOT, StopStrings


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The text that one token released."""

    text: str
    match: str | None = None
    """The stop string that is complete; no text after it is released."""

    @property
    def stopped(self) -> bool:
        return self.match is not None


class StopMatcher:
    """Hold back text while it could be the beginning of a stop string."""

    __slots__ = ("_include", "_node", "_num_held", "_num_ignored", "_num_ignored_chars", "_stops")

    def __init__(self, stops: StopStrings | None, *, include: bool = False, num_ignored: int = 0) -> None:
        """`stops` may be shared with other matchers; None: there are none. `include` releases the stop string, too.

        Stop strings that complete within the first `num_ignored` pushes are ignored.
        """
        self._stops = stops
        self._include = include
        self._node = ROOT
        """The node whose prefix is held back."""
        self._num_held = 0
        self._num_ignored = num_ignored
        self._num_ignored_chars = 0  # of those held back: stop strings that complete within them are ignored

    def push(self, text: str) -> Piece:
        stops = self._stops
        if stops is None:
            return Piece(text)
        before, num_held = self._node, self._num_held
        if self._num_ignored:
            self._num_ignored -= 1
            self._num_ignored_chars = num_held + len(text)
        ignored, node, step = self._num_ignored_chars, before, stops.step
        for end, character in enumerate(text, num_held + 1):
            node = step(node, character)
            # the stop string that completes first; of several, the one that begins first
            if node != ROOT and end > ignored and (match := stops.ended_at(node)) is not None:
                self._node, self._num_held = ROOT, 0
                return Piece(self._first(before, text, end if self._include else end - len(match)), match=match)
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


class TextStream:
    """One sequence's text: decoded, then searched for stop strings."""

    __slots__ = ("_decoder", "_matcher")

    def __init__(self, decoder: TokenDecoder, matcher: StopMatcher) -> None:
        self._decoder = decoder
        self._matcher = matcher

    def push(self, token_id: int) -> Piece:
        return self._matcher.push(self._decoder.push(token_id))

    def flush(self) -> Piece:
        """Release everything at the end. Even an incomplete character can complete a stop string."""
        piece = self._matcher.push(self._decoder.flush())
        return piece if piece.stopped else Piece(piece.text + self._matcher.flush())
