"""From token ids to text, piece by piece: incremental UTF-8 and stop strings.

Used by the detokenizer, one `TextStream` a sequence. What must always hold: the pieces joined are the whole text, cut
where a stop string begins; nothing is handed out that could still turn out to be part of a stop string or of an
unfinished character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec


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

    __slots__ = ("_held", "_include", "_num_deaf_chars", "_num_deaf_pieces", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False, num_deaf_pieces: int = 0) -> None:
        """`include`: the stop string itself is handed out too. Stop strings are not empty.

        None of them ends in the first `num_deaf_pieces` that are pushed.
        """
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_deaf_pieces = num_deaf_pieces
        self._num_deaf_chars = 0  # of those held: no stop string ends among them

    def push(self, text: str) -> Piece:
        if not self._stops:
            return Piece(text)
        buffer = self._held + text
        if self._num_deaf_pieces:
            self._num_deaf_pieces -= 1
            self._num_deaf_chars = len(buffer)
        deaf = self._num_deaf_chars
        found = [(at, stop) for stop in self._stops if (at := buffer.find(stop, max(0, deaf + 1 - len(stop)))) >= 0]
        if found:
            # the one that is complete first; of several, the one that begins first
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self._held = ""
            return Piece(buffer[: at + len(stop)] if self._include else buffer[:at], match=stop)
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        self._num_deaf_chars = max(0, deaf + keep - len(buffer))
        return Piece(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


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
