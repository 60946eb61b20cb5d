"""Receives answers of known length from a process. Used by `grammar_process.py` and `image_pool.py`."""

from __future__ import annotations

import trio

READ_BYTES = 1 << 20


async def receive_exactly(stream: trio.abc.ReceiveStream, num_bytes: int) -> bytes:
    """Return the next `num_bytes` bytes. Raises EOFError if the stream ends before, and trio.BrokenResourceError."""
    data = bytearray()
    while len(data) < num_bytes:
        received = await stream.receive_some(min(READ_BYTES, num_bytes - len(data)))
        if not received:
            raise EOFError
        data += received
    return bytes(data)
