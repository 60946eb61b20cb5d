"""From token ids to text, piece by piece: incremental UTF-8 and stop strings (`stop_strings.py`).

Used by the detokenizer, one `TextStream` a sequence. What must always hold: the pieces joined are the whole text, cut
where a stop string begins; nothing is handed out that could still turn out to be part of a stop string or of an
unfinished character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .stop_strings import ROOT, StopStrings


class TokenDecoder(Protocol):
    """Turns ids into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, often all of its own."""
        ...

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for what never became a character."""
        ...


class ByteDecoder:
    """For byte-level vocabularies: a table of bytes a token, and one incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table[id]` is the token's bytes; empty for a token that is not shown."""
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        table = self._table
        return self._decode(table[token_id]) if token_id < len(table) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one token brought."""

    text: str
    match: str | None = None
    """The stop string that is complete; nothing after it is handed out."""

    @property
    def stopped(self) -> bool:
        return self.match is not None


class StopMatcher:
    """Holds back text while it could be the beginning of a stop string."""

    __slots__ = ("_include", "_node", "_num_deaf_chars", "_num_deaf_pieces", "_num_held", "_stops")

    def __init__(self, stops: StopStrings | None, *, include: bool = False, num_deaf_pieces: int = 0) -> None:
        """`stops` may be shared with other matchers; None: nothing stops. `include`: the stop string is handed out too.

        None of them ends in the first `num_deaf_pieces` that are pushed.
        """
        self._stops = stops
        self._include = include
        self._node = ROOT
        """Its prefix is what is held back."""
        self._num_held = 0
        self._num_deaf_pieces = num_deaf_pieces
        self._num_deaf_chars = 0  # of those held: no stop string ends among them

    def push(self, text: str) -> Piece:
        stops = self._stops
        if stops is None:
            return Piece(text)
        before, num_held = self._node, self._num_held
        if self._num_deaf_pieces:
            self._num_deaf_pieces -= 1
            self._num_deaf_chars = num_held + len(text)
        deaf, node, step = self._num_deaf_chars, before, stops.step
        for end, character in enumerate(text, num_held + 1):
            node = step(node, character)
            # the one that is complete first; of several, the one that begins first
            if node != ROOT and end > deaf and (match := stops.ended_at(node)) is not None:
                self._node, self._num_held = ROOT, 0
                return Piece(self._first(before, text, end if self._include else end - len(match)), match=match)
        self._node = stops.unfinished(node)
        self._num_held = stops.depth(self._node)
        num_out = num_held + len(text) - self._num_held
        self._num_deaf_chars = max(0, deaf - num_out)
        return Piece(self._first(before, text, num_out))

    def _first(self, before: int, text: str, count: int) -> str:
        """The first `count` characters of what was held before `text`, and `text`."""
        if not count or self._stops is None:
            return ""
        return self._stops.prefix(before, count) + text[: max(0, count - self._stops.depth(before))]

    def flush(self) -> str:
        """What was held back and is no stop string after all."""
        if self._stops is None:
            return ""
        held = self._stops.prefix(self._node, self._num_held)
        self._node, self._num_held = ROOT, 0
        return held


class TextStream:
    """One sequence's text: decoding, then stop strings."""

    __slots__ = ("_decoder", "_matcher")

    def __init__(self, decoder: TokenDecoder, matcher: StopMatcher) -> None:
        self._decoder = decoder
        self._matcher = matcher

    def push(self, token_id: int) -> Piece:
        return self._matcher.push(self._decoder.push(token_id))

    def flush(self) -> Piece:
        """The end: what both still hold. A character that was cut off can complete a stop string, too."""
        piece = self._matcher.push(self._decoder.flush())
        return piece if piece.stopped else Piece(piece.text + self._matcher.flush())
