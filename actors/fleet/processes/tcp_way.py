"""How an engine process on another machine finds its web process: the other end of `link_port.py`.

It is a `reconnection.Way`. The keeper that has started it holds its lifeline, and wrote the ticket into it, and the
secret that it shares with other engines, if it does.

What must always hold: it connects only to a web process that has its secret; once the lifeline is closed, to none.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlencode, urlsplit

import attrs
import structlog
import trio

from ...shared.checkpoint import CheckpointError
from ..frames import PeerGone
from .child import is_shortage
from .link_handshake import PEER_SECRET_BYTES, TICKET_BYTES, Impostor, LinkTicket, prepare, prove_as_engine
from .link_tls import LinkTls, fault_of, secure
from .reconnection import ATTEMPT_S, MAX_ALONE_S, RETRY_S, Admission, is_held, learn_incarnation

log = structlog.get_logger()

SCHEME, TLS_SCHEME = "tcp://", "tls://"
MAX_RETRY_S = 2.0
SETTLE_S = 0.3
"""How long after a lost connection to wait for the lifeline to close, before calling again."""


def address_of(host: str, port: int, tls: LinkTls | None = None) -> str:
    """Return where an engine calls: `tcp://HOST:PORT`, or `tls://HOST:PORT?...` with the files to use."""
    host = f"[{host}]" if ":" in host else host
    if tls is None:
        return f"{SCHEME}{host}:{port}"
    return f"{TLS_SCHEME}{host}:{port}?{urlencode({'cert': tls.cert, 'key': tls.key, 'ca': tls.ca})}"


@attrs.define(eq=False)
class TcpWay:
    _lifeline: int
    _host: str
    _port: int
    _ticket: LinkTicket
    tls: LinkTls | None = None
    peer_secret: bytes = attrs.field(default=b"", repr=False)
    """What engines that may fetch blocks from each other have in common; empty if this one may not."""
    _was_connected: bool = attrs.field(default=False, init=False)

    @classmethod
    def of_lifeline(cls, lifeline: int, address: str) -> TcpWay:
        """Return the way to an address (`address_of`), with the secrets that are in the lifeline."""
        parts = urlsplit(address)
        assert parts.hostname is not None and parts.port is not None
        files = {name: values[0] for name, values in parse_qs(parts.query).items()}
        tls = LinkTls(**files) if address.startswith(TLS_SCHEME) else None
        packed = os.read(lifeline, TICKET_BYTES + PEER_SECRET_BYTES)
        ticket, peer_secret = LinkTicket.unpack(packed[:TICKET_BYTES]), packed[TICKET_BYTES:]
        return cls(lifeline, parts.hostname, parts.port, ticket, tls, peer_secret)

    def is_open(self) -> bool:
        return is_held(self._lifeline)

    async def connect(self) -> Admission | None:
        if self._was_connected:
            await trio.sleep(SETTLE_S)
        retry_s = RETRY_S
        with trio.move_on_after(MAX_ALONE_S):
            while self.is_open():
                try:
                    with trio.move_on_after(ATTEMPT_S):
                        return await self._connect_once()
                except Impostor as error:
                    log.error("link.impostor", host=self._host, port=self._port, error=str(error))
                except CheckpointError as error:
                    log.error("link.tls_unusable", error=str(error))
                    return None
                except (RuntimeError, MemoryError) as error:
                    if not is_shortage(error):  # looking up the host takes a thread
                        raise
                except (OSError, PeerGone, trio.BrokenResourceError) as error:
                    if (fault := fault_of(error)) is not None:  # in TLS 1.3 it follows what the host has said
                        log.error("link.impostor", host=self._host, port=self._port, error=fault)
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        return None

    async def _connect_once(self) -> Admission:
        context = None if self.tls is None else self.tls.engine_context()
        stream = await trio.open_tcp_stream(self._host, self._port)
        try:
            prepare(stream)
            stream = await secure(stream, context, self._host)
            await prove_as_engine(stream, self._ticket)
            incarnation = await learn_incarnation(stream)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        self._was_connected = True
        return Admission(stream, incarnation)
