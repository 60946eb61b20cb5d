"""Whole responses, made in slices: large ones while their clients read them, or before they are stored."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Iterator

from quart import Response

from ..http.turns import take_slice, turn

MAX_MADE_BYTES = 1 << 16
"""Bytes of a large response that are made before it is sent."""


async def whole_response(pieces: Iterator[bytes]) -> Response:
    """Return a response with a length, or one that is made while its client reads it if it is large."""
    begun: list[bytes] = []
    num_bytes = 0
    while num_bytes < MAX_MADE_BYTES:
        async with turn():
            data = take_slice(pieces, MAX_MADE_BYTES - num_bytes)
        if not data:
            return Response(b"".join(begun), content_type="application/json")
        begun.append(data)
        num_bytes += len(data)
    response = Response(_rest(begun, pieces), content_type="application/json")
    response.timeout = None
    return response


async def _rest(begun: list[bytes], pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield b"".join(begun)
    begun.clear()
    while True:
        async with turn():
            data = take_slice(pieces, MAX_MADE_BYTES)
        if not data:
            return
        yield data


async def joined(pieces: Iterator[bytes], max_bytes: int = sys.maxsize) -> bytes:
    """Return all pieces, made in slices; if they are longer than `max_bytes`, the first ones that are."""
    made: list[bytes] = []
    num_bytes = 0
    while num_bytes <= max_bytes:
        async with turn():
            data = take_slice(pieces, MAX_MADE_BYTES)
        if not data:
            break
        made.append(data)
        num_bytes += len(data)
    return b"".join(made)
