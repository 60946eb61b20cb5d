"""The first bytes that an engine process sends: which version of quipu it is.

Sent by `engine_server.py` before it reads its configuration, and checked by `connected_host.py`. Both processes come
from one installation, unless that is upgraded while the server runs; the messages of two versions may differ.

What must always hold: these bytes have the same form in every version.
"""

from __future__ import annotations

import socket

import trio

from quipu import __version__

from ..frames import PeerGone, Unreadable

NUM_BYTES = 32
_START = b"quipu "


class OtherVersion(Exception):
    """The engine process was started from another version than this server. The message says so."""


def greeting(version: str) -> bytes:
    return (_START + version.encode())[:NUM_BYTES].ljust(NUM_BYTES)


def send_greeting(connection: socket.socket) -> None:
    """Send this version's greeting, for which a new socket always has room."""
    connection.send(greeting(__version__), socket.MSG_NOSIGNAL)


async def receive_greeting(stream: trio.abc.ReceiveStream) -> None:
    """Wait for the greeting. Raises OtherVersion, Unreadable if it is not a greeting, and PeerGone."""
    received = b""
    while len(received) < NUM_BYTES:
        try:
            data = await stream.receive_some(NUM_BYTES - len(received))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the stream is broken") from error
        if not data:
            raise PeerGone("end of file")
        received += data
        if not received.startswith(_START[: len(received)]):
            raise Unreadable("it did not say which version it is")
    check_version(received)


def check_version(received: bytes) -> None:
    """Raise OtherVersion if a greeting is not that of this version."""
    if received != greeting(__version__):
        theirs = received.removeprefix(_START).decode("ascii", "replace").strip()
        raise OtherVersion(f"the engine is of quipu {theirs}, this server of {__version__}: restart the server")
