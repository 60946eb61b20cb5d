"""Which buffers of a connection are free, and which the client has.

Used by the server's ways to send blocks.

What must always hold: a buffer is free, in use by the server, or the client's; the client gives back only what it has.
"""

from __future__ import annotations

import trio

from .peer_link import LinkLost


class BufferTurns:
    def __init__(self, num_buffers: int) -> None:
        self._client: set[int] = set()
        self._free = list(range(num_buffers))
        self._num_free = trio.Semaphore(num_buffers)

    async def take(self) -> int:
        """Wait for a free buffer. The one that was used last is still in a processor's cache."""
        await self._num_free.acquire()
        return self._free.pop()

    def take_nowait(self) -> int | None:
        """Return a free buffer, if there is one now."""
        try:
            self._num_free.acquire_nowait()
        except trio.WouldBlock:
            return None
        return self._free.pop()

    def hand_out(self, buffer: int) -> None:
        """Note that the client has a buffer from now on."""
        self._client.add(buffer)

    def has_client(self, buffer: int) -> bool:
        return buffer in self._client

    def take_over(self, buffer: int) -> None:
        """Note that the client gives a buffer back. Raises LinkLost if it did not have that."""
        if buffer not in self._client:
            raise LinkLost(f"the peer gave back buffer {buffer}, which it did not have")
        self._client.discard(buffer)

    def give_back(self, buffer: int) -> None:
        """Free a buffer that the server has."""
        self._free.append(buffer)
        self._num_free.release()
