"""How an engine process on another machine finds its web process: the other end of `link_port.py`.

It is a `reconnection.Way`. Its lifeline is held by whoever has started it on this machine, who also wrote the ticket
into it.

What must always hold: it is connected only to a web process that has its secret; once the lifeline is closed, to none.
"""

from __future__ import annotations

import os

import structlog
import trio

from ..frames import PeerGone
from .link_handshake import TICKET_BYTES, Impostor, LinkTicket, prepare, prove_as_engine
from .reconnection import ATTEMPT_S, MAX_ALONE_S, RETRY_S, Admission, is_held, learn_incarnation

log = structlog.get_logger()

SCHEME = "tcp://"
MAX_RETRY_S = 2.0


class TcpWay:
    def __init__(self, lifeline: int, host: str, port: int, ticket: LinkTicket) -> None:
        self._lifeline = lifeline
        self._host = host
        self._port = port
        self._ticket = ticket

    @classmethod
    def of_lifeline(cls, lifeline: int, address: str) -> TcpWay:
        """Return the way to `tcp://HOST:PORT`, with the ticket that is in the lifeline."""
        host, _, port = address.removeprefix(SCHEME).rpartition(":")
        return cls(lifeline, host, int(port), LinkTicket.unpack(os.read(lifeline, TICKET_BYTES)))

    def is_open(self) -> bool:
        """Return whether this process may still be wanted."""
        return is_held(self._lifeline)

    async def connect(self) -> Admission | None:
        """Connect to the host until it admits this process. None: it is not wanted, or the host is gone."""
        retry_s = RETRY_S
        with trio.move_on_after(MAX_ALONE_S):
            while self.is_open():
                try:
                    with trio.move_on_after(ATTEMPT_S):
                        return await self._connect_once()
                except Impostor as error:
                    log.error("link.impostor", host=self._host, port=self._port, error=str(error))
                except (OSError, PeerGone, trio.BrokenResourceError):
                    pass
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        return None

    async def _connect_once(self) -> Admission:
        stream = await trio.open_tcp_stream(self._host, self._port)
        try:
            prepare(stream)
            await prove_as_engine(stream, self._ticket)
            incarnation = await learn_incarnation(stream)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return Admission(stream, incarnation)
