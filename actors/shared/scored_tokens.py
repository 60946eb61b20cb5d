"""Scored tokens in columns, without an object for each.

A prompt of 8,000 tokens with the twenty most likely tokens for each has 168,000 entries: twelve bytes each here, over
a hundred as objects. So the executor packs them, they are sent and kept packed, and they become `ScoredToken`s a few
at a time when they are written to the client.

    batch_builder.py ─ pack ─▶ StepPayloads.payloads ─▶ logprob_assembler.py: one `ScoredColumns` per prompt
                                                                           ─▶ web: `tokens(start, end)`

What must always hold: tokens come out as they were put in, in order, each number exact to the bit.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator
from itertools import chain

from ..messages.scores import LikelyToken, ScoredToken, Scores
from .token_decoding import TokenTextLookup

_HEADER = struct.Struct("=II")
"""Tokens, and the most likely tokens given for each. Columns follow: of ids and ranks, then of logprobs."""
_ID_BYTES = array("I").itemsize
_LOGPROB_BYTES = array("d").itemsize


def pack(scores: Scores) -> bytes:
    """Pack columns into bytes. Raises ValueError if tokens have different numbers of most likely tokens."""
    num_top = len(scores.top_ids[0]) if scores.top_ids else 0
    if any(len(ids) != num_top for ids in scores.top_ids):
        raise ValueError("prompt tokens of one sequence have different numbers of most likely tokens")
    columns = (
        array("I", scores.token_ids),
        array("I", scores.ranks),
        array("I", chain.from_iterable(scores.top_ids)),
        array("d", scores.logprobs),
        array("d", chain.from_iterable(scores.top_logprobs)),
    )
    return _HEADER.pack(len(scores.token_ids), num_top) + b"".join(columns)


def num_packed(payload: bytes) -> int:
    """Return the number of packed tokens."""
    num_tokens: int = _HEADER.unpack_from(payload)[0]
    return num_tokens


class ScoredColumns:
    """A growing list of scored tokens; implements `messages.scores.TokenScores`."""

    def __init__(self, token_text: TokenTextLookup) -> None:
        """`token_text` returns the text of any token that is added."""
        self._token_text = token_text
        self._token_ids = array("I")
        self._offsets = array("I")
        self._logprobs = array("d")
        """NaN for a token without a score, whose rank is 0."""
        self._ranks = array("I")
        self._top_ids = array("I")
        self._top_logprobs = array("d")
        self._top_ends = array("I")
        """Index after each token's last entry in the columns of most likely tokens."""

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory that the columns use."""
        columns = (self._token_ids, self._offsets, self._logprobs, self._ranks, self._top_ids, self._top_logprobs)
        return sum(len(column) * column.itemsize for column in (*columns, self._top_ends))

    def append(self, token: ScoredToken) -> None:
        self._token_ids.append(token.token_id)
        self._offsets.append(token.offset)
        self._logprobs.append(math.nan if token.logprob is None else token.logprob)
        self._ranks.append(token.rank or 0)
        for likely in token.top:
            self._top_ids.append(likely.token_id)
            self._top_logprobs.append(likely.logprob)
        self._top_ends.append(len(self._top_ids))

    def append_unscored(self, token_id: int) -> None:
        """Append a prompt's first token, which has no score."""
        self.append(ScoredToken(token_id, "", b"", 0, None, None, ()))

    def extend(self, payload: bytes, offsets: array[int]) -> None:
        """Append packed tokens. Raises if they cannot be read, without having appended any.

        `offsets` has one entry per token, or none if offsets are not needed.
        """
        count, num_top = _HEADER.unpack_from(payload)
        lengths = [_ID_BYTES * count, _ID_BYTES * count, _ID_BYTES * count * num_top]
        lengths += [_LOGPROB_BYTES * count, _LOGPROB_BYTES * count * num_top]
        view = memoryview(payload)[_HEADER.size :]
        if view.nbytes != sum(lengths):
            raise ValueError("packed scores have another length than they say")
        num_likely = len(self._top_ids)
        ids = (self._token_ids, self._ranks, self._top_ids)
        columns: tuple[array[int] | array[float], ...] = (*ids, self._logprobs, self._top_logprobs)
        for column, length in zip(columns, lengths, strict=True):
            column.frombytes(view[:length])
            view = view[length:]
        self._offsets.extend(offsets or array("I", bytes(_ID_BYTES * count)))
        self._top_ends.extend(num_likely + num_top * at for at in range(1, count + 1))

    def offset(self, at: int) -> int:
        """Return the number of characters before one token in its choice's text."""
        return self._offsets[at]

    def tokens(self, start: int, end: int, num_top: int) -> Iterator[ScoredToken]:
        """Yield the tokens from `start` to `end`, each with at most `num_top` of the most likely ones."""
        token_text, top_ids, top_logprobs = self._token_text, self._top_ids, self._top_logprobs
        for at in range(start, min(end, len(self._token_ids))):
            first = self._top_ends[at - 1] if at else 0
            likeliest = []
            for rank, place in enumerate(range(first, min(self._top_ends[at], first + num_top)), start=1):
                top_id = top_ids[place]
                decoded = token_text(top_id)
                likeliest.append(LikelyToken(top_id, decoded.text, decoded.utf8, top_logprobs[place], rank))
            token_id, rank = self._token_ids[at], self._ranks[at]
            decoded = token_text(token_id)
            yield ScoredToken(
                token_id=token_id,
                text=decoded.text,
                utf8=decoded.utf8,
                offset=self._offsets[at],
                logprob=self._logprobs[at] if rank else None,
                rank=rank or None,
                top=tuple(likeliest),
            )
