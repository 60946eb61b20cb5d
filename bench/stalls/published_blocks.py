"""KV events of an upstream, in batches that are nearly as large as they may be, or larger. Used by `upstream.py`.

Half a million blocks of 16 tokens are stored in events of nearly half a megabyte, and then removed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

NUM_BLOCKS = 500_000
BLOCKS_PER_EVENT = 6_000
EVENTS_PER_BATCH = 16
BLOCK_SIZE = 16
REMOVED_EACH = 50
_TOKEN = 70_000
"""It takes five bytes."""


class BlockPublisher:
    """Publishes batches on a port of its own."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._num_sent = 0

    def publish(self, *, at_once: bool) -> None:
        """Publish that many blocks were stored, and then that they were removed.

        `at_once`: in one batch each, which is larger than is read.
        """
        stored = _stored()
        step = len(stored) if at_once else EVENTS_PER_BATCH
        for first in range(0, len(stored), step):
            self._send(stored[first : first + step])
        self._send(_removed())

    def _send(self, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, events])
        self._socket.send_multipart((b"", self._num_sent.to_bytes(8, "big"), payload))
        self._num_sent += 1


def _stored() -> list[Any]:
    events: list[Any] = []
    for first in range(0, NUM_BLOCKS, BLOCKS_PER_EVENT):
        names = list(range(first, first + BLOCKS_PER_EVENT))
        tokens = [_TOKEN] * (BLOCKS_PER_EVENT * BLOCK_SIZE)
        events.append(["BlockStored", names, first - 1 if first else None, tokens, BLOCK_SIZE, None, "GPU", None])
    return events


def _removed() -> list[Any]:
    return [
        ["BlockRemoved", list(range(first, first + REMOVED_EACH)), "GPU"]
        for first in range(0, NUM_BLOCKS, REMOVED_EACH)
    ]
