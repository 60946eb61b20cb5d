"""How two engines of different machines prove to each other that they serve for the same web process.

All engines of a web process have the same secret, which came to each with the ticket for its own connection to that
(`fleet/processes/tcp_way.py`). Two engines are connected by several streams, each of which is
proved by itself. Everything here has a fixed length, and is exchanged before any message is decoded:

    client ─▶ server   version, which listener is called, connection, the stream's number, how many, a nonce
    server ─▶ client   a nonce, the server's proof
    client ─▶ server   the client's proof

A proof is an HMAC-SHA256 of who gives it and of all that was said before, as in that handshake, with other labels.

What must always hold: the secret is never sent; a client proves nothing to a server that has not proved itself first;
a proof is of one stream, by its number, to one listener, and is worth nothing for another.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final

import attrs
import trio

from quipu import __version__

from ...fleet.frames import Unreadable
from ...fleet.processes.greeting import NUM_BYTES as GREETING_BYTES
from ...fleet.processes.greeting import greeting
from ...fleet.processes.link_handshake import NONCE_BYTES, PEER_SECRET_BYTES, PROOF_BYTES, Impostor
from ...fleet.processes.reconnection import receive_exactly

ID_BYTES: Final = 16
FEWEST_STREAMS: Final = 2
MOST_STREAMS: Final = 16
_SERVER, _CLIENT = b"quipu peer that serves", b"quipu peer that fetches"
_HEAD: Final = struct.Struct(f"{GREETING_BYTES}s{ID_BYTES}s{ID_BYTES}sBB{NONCE_BYTES}s")
_START: Final = greeting("")[:6]


@attrs.frozen
class StreamName:
    """Which stream of which connection this is."""

    listener: bytes
    """Identifies the listener that is called."""
    connection: bytes
    number: int
    num_streams: int

    @property
    def is_possible(self) -> bool:
        return 0 <= self.number < self.num_streams and FEWEST_STREAMS <= self.num_streams <= MOST_STREAMS


async def prove_as_client(stream: trio.abc.Stream, secret: bytes, name: StreamName) -> None:
    """Have the server prove itself, and then prove which stream this is. Raises Impostor and PeerGone."""
    head = _HEAD.pack(
        greeting(__version__),
        name.listener,
        name.connection,
        name.number,
        name.num_streams,
        secrets.token_bytes(NONCE_BYTES),
    )
    await stream.send_all(head)
    transcript = head + await receive_exactly(stream, NONCE_BYTES)
    if not hmac.compare_digest(await receive_exactly(stream, PROOF_BYTES), _proof(secret, _SERVER, transcript)):
        raise Impostor("who answers there does not have the secret of these engines")
    await stream.send_all(_proof(secret, _CLIENT, transcript))


async def prove_as_server(stream: trio.abc.Stream, secret: bytes, listener: bytes) -> StreamName:
    """Prove to a client that this is the listener, and have it prove itself. Return which stream this is.

    Raises Impostor, PeerGone, and Unreadable if the other end is no engine. A caller of another listener gets the
    answer that a wrong secret gets.
    """
    start = await receive_exactly(stream, len(_START))
    if start != _START:
        raise Unreadable("it did not say which version it is")
    head = start + await receive_exactly(stream, _HEAD.size - len(start))
    version, called, connection, number, num_streams, _ = _HEAD.unpack(head)
    if called != listener:
        secret = secrets.token_bytes(PEER_SECRET_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = head + nonce
    await stream.send_all(nonce + _proof(secret, _SERVER, transcript))
    if not hmac.compare_digest(await receive_exactly(stream, PROOF_BYTES), _proof(secret, _CLIENT, transcript)):
        raise Impostor("it does not have the secret of these engines")
    if version != greeting(__version__):
        raise Unreadable("it is of another version")
    return StreamName(called, connection, number, num_streams)


def _proof(secret: bytes, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, who + transcript, "sha256")
