"""Token ids in responses, for clients that send `return_token_ids`, an extension of vLLM.

There may be a hundred thousand of them, so they are encoded in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

MAX_IDS = 1 << 14
"""Ids encoded in one piece: well under a millisecond of work."""


def id_pieces(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield a JSON array of token ids."""
    yield b"["
    for start in range(0, len(token_ids), MAX_IDS):
        yield (b"," if start else b"") + orjson.dumps(list(token_ids[start : start + MAX_IDS]))[1:-1]
    yield b"]"
