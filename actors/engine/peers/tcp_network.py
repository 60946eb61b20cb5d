"""The engines of several machines: where each listens, and how they are connected by TCP (`tcp_link.py`).

Streams are connected one after the other, and each is proved by itself (`peer_handshake.py`), within TLS where the link
to the web process has it: an engine that is called has the files of its machine, and its certificate names the address
that is called. Callers that have not proved themselves are met by `fleet/processes/strangers.py`.

What must always hold: nothing of a caller is decoded before it has proved itself; connections, finished or not, are
bounded in number; one whose streams do not all come in time is closed.
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import structlog
import trio

from ...fleet.frames import PeerGone, Unreadable
from ...fleet.processes.link_handshake import Impostor
from ...fleet.processes.link_tls import LinkTls, fault_of
from ...fleet.processes.strangers import Strangers
from ...shared.checkpoint import CheckpointError
from ...threads import run_in_thread
from .listening_socket import listen_at
from .peer_handshake import ID_BYTES, StreamName, prove_as_client, prove_as_server
from .peer_link import LinkLost, PeerLink
from .tcp_link import TcpLink
from .tcp_stream import TcpStream

log = structlog.get_logger()

NUM_STREAMS: Final = 5
"""Of a connection: one for messages, the others for bytes."""
MAX_STRANGERS: Final = 64
MAX_OF_ADDRESS: Final = 16
"""One at a time of each of so many engines on a machine."""
MAX_CONNECTIONS: Final = 128
"""Of one listener, those included whose streams have not all come."""
COMPLETION_S: Final = 10.0
"""How long the streams of a connection may take to come."""
_ADDRESS: Final = re.compile(r"tcp://(?:\[([0-9a-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})/([0-9a-f]{32})")


@attrs.frozen
class PeerAddress:
    """Where an engine listens, as other engines are told."""

    host: str
    """An address, no name."""
    port: int
    listener: bytes
    """Identifies it: another engine may listen at the same port later."""

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Raises LinkLost."""
        if (parts := _ADDRESS.fullmatch(text)) is None:
            raise LinkLost(f"an engine of another machine has no address like {text[:80]!r}")
        v6, v4, port, listener = parts.groups()
        try:
            host = str(ipaddress.ip_address(v6 or v4))
        except ValueError as error:
            raise LinkLost(f"an engine of another machine has no address like {text[:80]!r}") from error
        return cls(host, int(port), bytes.fromhex(listener))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.listener.hex()}"


@attrs.define(eq=False)
class _Unfinished:
    """A connection of which not all streams have come."""

    num_streams: int
    streams: dict[int, TcpStream] = attrs.field(factory=dict)
    is_over: trio.Event = attrs.field(factory=trio.Event)


class TcpListener:
    def __init__(self, listening: socket.socket, secret: bytes, tls: ssl.SSLContext | None) -> None:
        self._secret = secret
        self._tls = tls
        self._socket = listening
        host, port = self._socket.getsockname()[:2]
        self.place = PeerAddress(host, port, secrets.token_bytes(ID_BYTES))
        self._strangers = Strangers(self._meet, _tell, MAX_STRANGERS, MAX_OF_ADDRESS)
        self._unfinished: dict[bytes, _Unfinished] = {}
        self._num_open = 0
        self._offer, self._offered = trio.open_memory_channel[PeerLink](math.inf)  # bounded by MAX_CONNECTIONS
        self._tasks: trio.Nursery | None = None

    @property
    def address(self) -> str:
        return str(self.place)

    @property
    def num_refused(self) -> int:
        return self._strangers.num_refused

    @property
    def num_open(self) -> int:
        """Connections that are not closed, finished or not."""
        return self._num_open + len(self._unfinished)

    async def run(self, *others: Callable[[], Awaitable[None]]) -> None:
        """Meet those who connect, until cancelled, and run `others`, which may offer connections."""
        try:
            async with trio.open_nursery() as self._tasks:
                for other in others:
                    self._tasks.start_soon(other)
                await self._strangers.meet(trio.socket.from_stdlib_socket(self._socket))
        finally:
            with trio.CancelScope(shield=True):
                while self._offered.statistics().current_buffer_used:
                    await self._offered.receive_nowait().close()

    async def accept(self) -> PeerLink:
        return await self._offered.receive()

    def close(self) -> None:
        self._socket.close()

    async def _meet(self, connection: trio.socket.SocketType) -> str:
        """Keep a stream that proves to be one of an engine's, or return why there is none."""
        is_kept = False
        stream = TcpStream.take(connection)
        try:
            await stream.secure(self._tls, None)
            name = await prove_as_server(stream, self._secret, self.place.listener)
            refusal = self._keep(stream, name)
            is_kept = not refusal
        except (Impostor, Unreadable) as error:
            return str(error)
        except (PeerGone, OSError, trio.BrokenResourceError) as error:
            return fault_of(error) or "it went away"
        finally:
            if not is_kept:
                with trio.CancelScope(shield=True):
                    await stream.aclose()
        return refusal

    def _keep(self, stream: TcpStream, name: StreamName) -> str:
        """Add a stream to its connection, and offer that once it is whole. Return why the stream is refused."""
        if not name.is_possible:
            return "it is no possible stream of a connection"
        unfinished = self._unfinished.get(name.connection)
        if unfinished is None:
            if not self.has_room:
                return "there are too many connections"
            assert self._tasks is not None
            unfinished = self._unfinished[name.connection] = _Unfinished(name.num_streams)
            self._tasks.start_soon(self._watch, name.connection, unfinished)
        if name.num_streams != unfinished.num_streams or name.number in unfinished.streams:
            return "its connection has no such stream"
        if name.number:
            stream.begin_carrying()
        unfinished.streams[name.number] = stream
        if len(unfinished.streams) == unfinished.num_streams:
            messages, *carriers = (unfinished.streams.pop(number) for number in range(unfinished.num_streams))
            del self._unfinished[name.connection]
            unfinished.is_over.set()
            self.offer(TcpLink(messages, carriers, self.note_closed))
        return ""

    async def _watch(self, connection: bytes, unfinished: _Unfinished) -> None:
        """Close the streams of a connection that is not whole in time, or when this listener ends."""
        try:
            with trio.move_on_after(COMPLETION_S):
                await unfinished.is_over.wait()
        finally:
            if self._unfinished.get(connection) is unfinished:
                del self._unfinished[connection]
            with trio.CancelScope(shield=True):
                for stream in unfinished.streams.values():
                    await stream.aclose()

    @property
    def has_room(self) -> bool:
        """Whether there may be one more connection."""
        return self.num_open < MAX_CONNECTIONS

    def offer(self, link: PeerLink) -> None:
        """Have `accept` return a connection, which is to call `note_closed` when it is closed."""
        self._num_open += 1
        self._offer.send_nowait(link)

    def note_closed(self) -> None:
        self._num_open -= 1


@attrs.frozen
class TcpNetwork:
    """The way to engines of other machines, and from them."""

    _host: str
    """The address by which they reach this machine."""
    _secret: bytes = attrs.field(repr=False)
    _tls: LinkTls | None = None
    _num_streams: int = NUM_STREAMS
    _ports: tuple[int, int] | None = attrs.field(default=None, kw_only=True)
    """The first and the last one at which to listen; None: any."""

    def listen(self) -> TcpListener:
        """Raises OSError, NoPeerPort, and CheckpointError if TLS's files cannot be used."""
        context = None if self._tls is None else self._tls.host_context()
        return TcpListener(listen_at(self._host, self._ports), self._secret, context)

    async def connect(self, address: str) -> PeerLink:
        place = PeerAddress.parse(address)
        context = None if self._tls is None else await run_in_thread(_context_of, self._tls)
        connection = secrets.token_bytes(ID_BYTES)
        streams: list[TcpStream] = []
        try:
            for number in range(self._num_streams):
                name = StreamName(place.listener, connection, number, self._num_streams)
                streams.append(await self._connect_one(place, context, name))
            for stream in streams[1:]:
                stream.begin_carrying()
        except BaseException:
            with trio.CancelScope(shield=True):
                for stream in streams:
                    await stream.aclose()
            raise
        return TcpLink(streams[0], streams[1:])

    async def _connect_one(self, place: PeerAddress, context: ssl.SSLContext | None, name: StreamName) -> TcpStream:
        """Raises OSError and LinkLost."""
        connecting = trio.socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
        try:
            await connecting.connect((place.host, place.port))
            stream = TcpStream.take(connecting)
        finally:
            connecting.close()  # which does nothing once it was taken
        try:
            await stream.secure(context, place.host)
            await prove_as_client(stream, self._secret, name)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await stream.aclose()
            if isinstance(error, Impostor | PeerGone | trio.BrokenResourceError):
                raise LinkLost(fault_of(error) or str(error)) from error
            raise
        return stream


def _context_of(tls: LinkTls) -> ssl.SSLContext:
    """Raises LinkLost if the files cannot be used."""
    try:
        return tls.engine_context()
    except CheckpointError as error:
        raise LinkLost(str(error)) from error


def _tell(address: str, reason: str, num_refused: int) -> None:
    log.warning("peer.refused", address=address, reason=reason, num_refused=num_refused)
