"""Messages of a link as bytes: the length, 4 bytes, then msgpack. Used by the links that have a stream for them.

What must always hold: a message is decoded within bounds; what is no message ends the connection.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from .peer_link import LinkLost, PeerMessage

MAX_MESSAGE_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(PeerMessage)


def frame_of(message: PeerMessage) -> bytes:
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


class ReceivedFrames:
    """What has come of a stream, and is not cut into messages yet."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes | bytearray) -> None:
        self._received += data

    def cut(self) -> PeerMessage | None:
        """Return the next complete message. Raises LinkLost if what has come is none."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if length > MAX_MESSAGE_BYTES:
            raise LinkLost(f"the peer sends a message of {length} bytes")
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        try:
            message: PeerMessage = _DECODER.decode(bytes(received[_LENGTH.size : end]))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise LinkLost(f"the peer sends what is no message: {error}") from error
        del received[:end]
        return message
