"""Logprobs in responses: how they are requested, and how they come into events and items.

What is encoded of a text has a hole where its logprobs belong; the holes are filled when it is sent, a millisecond of
work at a time, since the events and the items of one text repeat them.

What must always hold: no hole leaves this server; an answer without logprobs costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import orjson

from ..fields import Fields
from ..generation import NO_SCORES, WantedScores
from ..text_scores import TextScores
from .logprobs import MAX_ENTRIES, array_pieces, chat_entry

INCLUDED = "message.output_text.logprobs"
"""What `include` has to contain."""
_HOLE = b"\0"
"""On both sides of a range of tokens. JSON has no such byte."""


def read_response_scores(fields: Fields) -> tuple[WantedScores, tuple[str, ...]]:
    """Return which logprobs a response requests, and the paths of fields without an effect. Raises APIError."""
    num_top = fields.integer("top_logprobs") or 0
    if INCLUDED in (fields.get("include") or ()):
        return WantedScores(output=num_top), ()
    return NO_SCORES, ("top_logprobs",) * (num_top > 0)


@attrs.frozen
class Logprobs:
    """The logprobs of the text of one response."""

    num_top: int
    scores: TextScores

    def hole(self, tokens: range) -> orjson.Fragment:
        """Return what stands for the logprobs of some tokens."""
        return orjson.Fragment(b"%b%d,%d%b" % (_HOLE, tokens.start, tokens.stop, _HOLE))

    def pieces(self, tokens: range) -> Iterator[bytes]:
        """Yield the logprobs of some tokens as JSON."""
        return array_pieces(
            (self.scores.columns,), self.num_top, lambda token: chat_entry(token, self.num_top), tokens=tokens
        )

    def fill(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield `pieces` with logprobs in the holes."""
        for piece in pieces:
            for at, part in enumerate(piece.split(_HOLE)):
                if at % 2:
                    yield from self.pieces(_range(part))
                else:
                    yield part

    def is_small(self, data: bytes) -> bool:
        """Return whether what fills the holes in `data` is made in about a millisecond."""
        num_tokens = sum(map(len, map(_range, data.split(_HOLE)[1::2])))
        return num_tokens * (self.num_top + 1) <= MAX_ENTRIES


def _range(hole: bytes) -> range:
    start, stop = hole.split(b",")
    return range(int(start), int(stop))
