"""From token ids to what the output means: decoded, parsed into events, its text searched for stop strings.

Used by the detokenizer, with one `ParsedStream` per sequence whose API tells reasoning and calls from text; for others
there is `text_stream.py`. Stop strings are searched for in the answer's text alone: what a model thinks, or writes into
a call, does not end it.

What must always hold: the events concatenated are the whole output, cut where a stop string begins or the last call
that is wanted ends; no text is released that may still turn out to be part of a delimiter or of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..messages.output import CallEnd, OutputEvent, TextDelta
from ..shared.token_decoding import TokenDecoder
from .response_parsing.response_parser import ResponseParser
from .text_stream import Piece, StopMatcher


class ParserFailed(Exception):
    """The parser raised, because of a bug. Only the output of its sequence is lost."""


@attrs.define(eq=False)
class ParsedStream:
    """One sequence's output, token by token. Its methods raise ParserFailed."""

    _decoder: TokenDecoder
    _parser: ResponseParser
    _matcher: StopMatcher
    _calls_left: int | None = None
    """Calls until the output is complete."""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def push(self, token_id: int) -> Piece:
        return self._release(self._parsed(token_id, self._decoder.push(token_id)))

    def push_hidden(self, token_id: int) -> Piece:
        """Take the token that ends the output and is not shown: it may be one of reasoning."""
        return self._release(self._parsed(token_id, ""))

    def flush(self) -> Piece:
        """Release everything at the end. Even that can complete a stop string."""
        piece = self._release(self._parsed(None, self._decoder.flush()))
        return piece if piece.is_complete else piece.joined(Piece(self._matcher.flush()))

    def _parsed(self, token_id: int | None, piece: str) -> Sequence[OutputEvent]:
        """Return the events of a token, or of the output's end."""
        try:
            return self._parser.finish(piece) if token_id is None else self._parser.push(token_id, piece)
        except Exception as error:
            raise ParserFailed from error

    def _release(self, events: Sequence[OutputEvent]) -> Piece:
        """Search the text of one token's events, and return those that may be shown."""
        matcher, is_new_token = self._matcher, True
        texts: list[str] = []  # not yet in `released`
        released: list[OutputEvent] = []
        match, is_complete = None, False
        if not events:
            matcher.push("")
        for event in events:
            if isinstance(event, TextDelta):
                piece = matcher.push(event.text, is_new_token=is_new_token)
                is_new_token = False
                texts.append(piece.text)
                if piece.is_complete:
                    match, is_complete = piece.match, True
                    break
                continue
            if is_new_token:
                matcher.push("")
                is_new_token = False
            texts.append(matcher.flush())  # what is not text ends a stop string that has begun
            _append_text(texts, released)
            released.append(event)
            if isinstance(event, CallEnd) and self._calls_left is not None:
                self._calls_left -= 1
                if not self._calls_left:
                    is_complete = True
                    break
        if not released:
            return Piece("".join(texts), match, is_complete)
        _append_text(texts, released)
        return Piece("", match, is_complete, tuple(released))


def _append_text(texts: list[str], released: list[OutputEvent]) -> None:
    text = "".join(texts)
    texts.clear()
    if text:
        released.append(TextDelta(text))
