"""How a web process and an engine process on another machine prove to each other that they belong together.

Both have the same ticket, which came to the engine by another way than this connection. Everything here has a fixed
length, and is exchanged before any message is decoded:

    engine ─▶ host   version (`greeting.py`), key, a nonce
    host ─▶ engine   a nonce, the host's proof
    engine ─▶ host   the engine's proof

A proof is an HMAC-SHA256, with the ticket's secret, of who gives it and of all that was said before the first proof. So
neither a recorded proof nor the other side's own is worth anything.

What must always hold: the secret is never sent; an engine proves nothing to a host that has not proved itself first; a
host does the same work and gives the same answer for a key that it does not know and for a wrong secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Protocol

import attrs
import trio

from quipu import __version__

from ..frames import Unreadable
from .greeting import NUM_BYTES as GREETING_BYTES
from .greeting import greeting
from .reconnection import receive_exactly

KEY_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
TICKET_BYTES = KEY_BYTES + PROOF_BYTES
PEER_SECRET_BYTES = 32
"""Of what all engines of one server have, to prove themselves to each other (`engine/peers/peer_handshake.py`)."""
HEAD_BYTES = GREETING_BYTES + KEY_BYTES + NONCE_BYTES
_HOST, _ENGINE = b"quipu host", b"quipu engine"
KEEP_ALIVE = (
    (socket.TCP_KEEPIDLE, 10),  # seconds of silence before the first probe
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),  # milliseconds that sent data may stay without an answer
)


class Impostor(Exception):
    """The other side does not have the ticket's secret."""


@attrs.frozen
class LinkTicket:
    """What lets one engine process be connected to its web process."""

    key: bytes
    """Names the engine. No secret."""
    secret: bytes = attrs.field(repr=False)

    @classmethod
    def new(cls) -> LinkTicket:
        """Return a ticket that nobody else has."""
        return cls(secrets.token_bytes(KEY_BYTES), secrets.token_bytes(PROOF_BYTES))

    @classmethod
    def unpack(cls, packed: bytes) -> LinkTicket:
        return cls(packed[:KEY_BYTES], packed[KEY_BYTES:])

    def pack(self) -> bytes:
        """Return key and secret, `TICKET_BYTES` long."""
        return self.key + self.secret

    def proof(self, who: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self.secret, who + transcript, "sha256")


@attrs.frozen
class Caller:
    """What an engine has said of itself, as yet without a proof."""

    head: bytes

    @property
    def greeting(self) -> bytes:
        return self.head[:GREETING_BYTES]

    @property
    def key(self) -> bytes:
        return self.head[GREETING_BYTES : GREETING_BYTES + KEY_BYTES]


async def hear(stream: trio.SocketStream) -> Caller:
    """Wait until an engine has said who it is. Raises PeerGone, and Unreadable if it is no engine."""
    start = greeting("")[:6]
    head = await receive_exactly(stream, len(start))
    if head != start:
        raise Unreadable("it did not say which version it is")
    return Caller(head + await receive_exactly(stream, HEAD_BYTES - len(head)))


async def prove_as_host(stream: trio.SocketStream, caller: Caller, ticket: LinkTicket) -> None:
    """Prove to an engine that this is its host, and have it prove itself. Raises Impostor and PeerGone."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    transcript = caller.head + nonce
    await stream.send_all(nonce + ticket.proof(_HOST, transcript))
    if not hmac.compare_digest(await receive_exactly(stream, PROOF_BYTES), ticket.proof(_ENGINE, transcript)):
        raise Impostor("it does not have an engine's secret")


async def prove_as_engine(stream: trio.SocketStream, ticket: LinkTicket) -> None:
    """Have the host prove itself, and then prove that this is its engine. Raises Impostor and PeerGone."""
    head = greeting(__version__) + ticket.key + secrets.token_bytes(NONCE_BYTES)
    await stream.send_all(head)
    nonce = await receive_exactly(stream, NONCE_BYTES)
    transcript = head + nonce
    if not hmac.compare_digest(await receive_exactly(stream, PROOF_BYTES), ticket.proof(_HOST, transcript)):
        raise Impostor("who answers there does not have this engine's secret")
    await stream.send_all(ticket.proof(_ENGINE, transcript))


class HasOptions(Protocol):
    """A socket, or a stream over one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def prepare(stream: HasOptions) -> None:
    """Have the kernel notice within half a minute that the other machine is gone; `TCP_NODELAY` is trio's default."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE:
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
