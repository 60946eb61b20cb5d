"""Reads the body of a response of which nobody knows how long it is."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import httpx2


async def read_pieces(answer: httpx2.Response, take: Callable[[bytes], bool]) -> None:
    """Give the pieces of a body to `take` as they arrive, until it returns that it wants no more."""
    with anyio.CancelScope() as scope:
        async for piece in answer.aiter_raw():
            # The next read is cancelled: leaving the loop here would leave generators of the client behind.
            if not scope.cancel_called and not take(piece):
                scope.cancel()


async def read_at_most(answer: httpx2.Response, most: int) -> bytes | None:
    """Return the body; None if it is longer than `most` bytes."""
    content = bytearray()

    def take(piece: bytes) -> bool:
        content.extend(piece)
        return len(content) <= most

    await read_pieces(answer, take)
    return bytes(content) if len(content) <= most else None
