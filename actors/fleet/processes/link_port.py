"""The port on which a web process awaits its engines that run on other machines.

One `LinkPort` serves all of them; each is an `ExpectedEngine`. The engine calls first when it is started, and again
whenever its connection was lost. `tcp_way.py` is the other end.

    host ─▶ engine   incarnation, 4 bytes, once both have proved themselves (`link_handshake.py`) and it is wanted
    engine ─▶ host   one byte, if it still waits on this connection; frames follow in both directions

With TLS (`link_tls.py`), all of that is within it. Callers are met by `strangers.py`.

What must always hold: nothing of a caller is decoded before it has proved itself; callers that have not are bounded, in
number and in what is read of them; a refused one is logged.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

import attrs
import structlog
import trio

from ..frames import PeerGone, Unreadable
from .greeting import check_version
from .link_handshake import Caller, Impostor, LinkTicket, hear, prepare, prove_as_host
from .link_tls import fault_of, secure
from .reconnection import GREETING_S, tell_incarnation
from .strangers import Strangers

log = structlog.get_logger()

MAX_STRANGERS = 16
"""Callers that have not proved themselves yet, at one time."""
MAX_OF_ADDRESS = 4
"""Those of one address."""
MAX_WAITING = 4
"""Connections on which one engine may wait to be admitted; the oldest is closed."""
BACKLOG = 64


@attrs.define(eq=False)
class ExpectedEngine:
    """Where one engine process may connect. Implements `engine_child.Entrance`."""

    _port: LinkPort
    ticket: LinkTicket = attrs.field(factory=LinkTicket.new, init=False)
    on_close: Callable[[], object] = attrs.field(default=lambda: None, init=False)
    """Tells the process to end."""
    _waiting: list[tuple[trio.SocketStream, Caller]] = attrs.field(factory=list, init=False)
    _called: trio.Event = attrs.field(factory=trio.Event, init=False)

    def offer(self, stream: trio.SocketStream, caller: Caller) -> None:
        """Keep a connection of this engine until it is wanted."""
        self._waiting.append((stream, caller))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.pop(0)[0].socket.close()
        self._called.set()

    async def wait_for_caller(self) -> None:
        while not self._waiting:
            self._called = trio.Event()
            await self._called.wait()

    async def admit(self, incarnation: int) -> trio.SocketStream:
        while True:
            await self.wait_for_caller()
            stream, caller = self._waiting.pop()  # the latest: it may have given up the others
            is_admitted = False
            try:
                check_version(caller.greeting)
                with trio.move_on_after(GREETING_S):
                    is_admitted = await tell_incarnation(stream, incarnation)
            except (PeerGone, trio.BrokenResourceError):
                continue
            finally:
                if not is_admitted:
                    stream.socket.close()
            if is_admitted:
                return stream

    def close(self) -> None:
        self._port.forget(self)
        for stream, _ in self._waiting:
            stream.socket.close()
        self._waiting.clear()
        self.on_close()


class LinkPort:
    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen at an address; port 0 means any. Without `tls`, connections are not secured. Raises OSError."""
        self._tls = tls
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        self._socket = socket.socket(family, kind)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setblocking(False)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._accepting = trio.socket.from_stdlib_socket(self._socket)
        self._expected: dict[bytes, ExpectedEngine] = {}
        self._nobody = LinkTicket.new()
        """Stands for the tickets of unknown callers; nobody has it."""
        self._strangers = Strangers(self._meet, _tell, MAX_STRANGERS, MAX_OF_ADDRESS)

    @property
    def address(self) -> tuple[str, int]:
        """The address that is listened at."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def num_strangers(self) -> int:
        """The number of callers that have not proved themselves yet, refused ones that wait included."""
        return self._strangers.num_at_once

    @property
    def num_refused(self) -> int:
        return self._strangers.num_refused

    def expect(self) -> ExpectedEngine:
        """Return where a new engine process may connect. It must be closed."""
        engine = ExpectedEngine(self)
        self._expected[engine.ticket.key] = engine
        return engine

    def forget(self, engine: ExpectedEngine) -> None:
        """Know an engine no more."""
        self._expected.pop(engine.ticket.key, None)

    async def run(self) -> None:
        """Meet callers until cancelled."""
        await self._strangers.meet(self._accepting)

    def close(self) -> None:
        """Listen no more, and know no engine any more."""
        self._accepting.close()
        for engine in tuple(self._expected.values()):
            engine.close()

    async def _meet(self, connection: trio.socket.SocketType) -> str:
        """Keep the connection for the engine that proves to be at its other end, or return why there is none."""
        stream = trio.SocketStream(connection)
        try:
            prepare(stream)
            stream = await secure(stream, self._tls, None)
            caller = await hear(stream)
            engine = self._expected.get(caller.key)
            await prove_as_host(stream, caller, self._nobody if engine is None else engine.ticket)
        except (Impostor, Unreadable) as error:
            return str(error)
        except (PeerGone, OSError, trio.BrokenResourceError) as error:
            return fault_of(error) or "it went away"
        if engine is None or self._expected.get(caller.key) is not engine:
            return "it is not expected any more"
        engine.offer(stream, caller)
        return ""


def _tell(address: str, reason: str, num_refused: int) -> None:
    log.warning("link.refused", address=address, reason=reason, num_refused=num_refused)
