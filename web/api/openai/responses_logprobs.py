"""Logprobs in responses: how they are requested, and how they come into events and items.

What is encoded of a text has a hole where its logprobs belong; the holes are filled when it is sent, a millisecond of
work at a time, since the events and the items of one text repeat them. Events that are kept keep their holes: they are
filled for each reader, from the scores or, once these are gone, from what is stored with the items.

What must always hold: no hole leaves this server; an answer without logprobs costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
import msgspec
import orjson

from ..fields import Fields
from ..generation import NO_SCORES, WantedScores
from ..text_scores import TextScores
from .logprobs import MAX_ENTRIES, array_pieces, chat_entry

INCLUDED = "message.output_text.logprobs"
"""What `include` has to contain."""
_HOLE = b"\0"
"""On both sides of a range of tokens. JSON has no such byte."""
_STORED_AT_ONCE = 256
"""Entries of tokens that are joined at once: half a megabyte at most."""
Fill = Callable[[Iterable[bytes]], Iterator[bytes]]
"""Yields what it is given with logprobs in the holes."""


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
        return _fill(pieces, self.pieces)

    def is_small(self, data: bytes) -> bool:
        """Return whether what fills the holes in `data` is made in about a millisecond."""
        num_tokens = sum(map(len, map(_range, data.split(_HOLE)[1::2])))
        return num_tokens * (self.num_top + 1) <= MAX_ENTRIES


@attrs.frozen
class StoredLogprobs:
    """The same once the response is stored."""

    entries: Sequence[bytes]
    """Of all tokens. Empty: they were too many to be stored, so that there are none."""

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> StoredLogprobs:
        """Return those of a response from what is stored of each of its texts. Runs in a thread."""
        decoder = msgspec.json.Decoder(list[msgspec.Raw])
        return cls([bytes(entry) for told in texts for entry in decoder.decode(told)])

    def pieces(self, tokens: range) -> Iterator[bytes]:
        """Yield the logprobs of some tokens as JSON."""
        yield b"["
        for start in range(tokens.start, min(tokens.stop, len(self.entries)), _STORED_AT_ONCE):
            some = self.entries[start : min(start + _STORED_AT_ONCE, tokens.stop)]
            yield (b"" if start == tokens.start else b",") + b",".join(some)
        yield b"]"

    def fill(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield `pieces` with logprobs in the holes."""
        return _fill(pieces, self.pieces)


def has_holes(data: bytes) -> bool:
    return _HOLE in data


def _fill(pieces: Iterable[bytes], told: Callable[[range], Iterator[bytes]]) -> Iterator[bytes]:
    for piece in pieces:
        for at, part in enumerate(piece.split(_HOLE)):
            if at % 2:
                yield from told(_range(part))
            else:
                yield part


def _range(hole: bytes) -> range:
    start, stop = hole.split(b",")
    return range(int(start), int(stop))
