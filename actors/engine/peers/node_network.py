"""The engines of several nodes: those of one node share memory (`unix_link.py`), others are connected by TCP.

An engine listens at both: by TCP (`tcp_network.py`), and at a Unix socket without a file. Its address tells where:

    tcp://10.0.0.3:40123/LISTENER#BOOT/NAME
                                  │    └── of the socket, which only processes of the same network namespace can reach
                                  └─────── of the kernel that runs there, anew at each start of a machine

Who calls on the own machine proves itself as by TCP, with the secret that all engines of a server share, and must
belong to the same user. Nobody relies on the address: if there is no such socket, or the engine behind it does not
prove itself, the connection is made by TCP.

What must always hold: no memory is shared before both ends have proved themselves; a socket that does not answer delays
no connection for longer than a moment.
"""

from __future__ import annotations

import re
import secrets
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from ...fleet.frames import PeerGone, Unreadable
from ...fleet.processes.link_handshake import Impostor
from ...fleet.processes.link_tls import LinkTls
from ...fleet.processes.strangers import Strangers
from .peer_handshake import ID_BYTES, StreamName, prove_as_client, prove_as_server
from .peer_link import LinkLost, PeerLink
from .tcp_network import MAX_OF_ADDRESS, MAX_STRANGERS, PeerAddress, TcpListener, TcpNetwork
from .unix_link import UnixLink, connect_to, is_same_user, listen_unnamed

log = structlog.get_logger()

ANSWER_S: Final = 1.0
"""How long a socket of this machine may take to answer."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HERE: Final = re.compile(r"([0-9a-f-]{36})/(quipu-peer-[0-9a-f]{32})")


def boot_id() -> str:
    """Return what identifies the running kernel, in every container of the machine. Empty: a sandbox hides it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class NodeListener:
    def __init__(self, remote: TcpListener, secret: bytes) -> None:
        """Listen on this machine, too. Raises OSError."""
        self._remote = remote
        self._secret = secret
        self._socket, name = listen_unnamed()
        self._strangers = Strangers(self._meet, _tell, MAX_STRANGERS, MAX_OF_ADDRESS)
        self.address = f"{remote.address}#{boot_id()}/{name}"

    @property
    def num_open(self) -> int:
        """Connections that are not closed, of both kinds."""
        return self._remote.num_open

    async def run(self) -> None:
        await self._remote.run(partial(self._strangers.meet, trio.socket.from_stdlib_socket(self._socket)))

    async def accept(self) -> PeerLink:
        return await self._remote.accept()

    def close(self) -> None:
        self._socket.close()
        self._remote.close()

    async def _meet(self, connection: trio.socket.SocketType) -> str:
        """Offer the connection of an engine that proves itself, or return why there is none."""
        if not is_same_user(connection):
            return "it belongs to another user"
        try:
            name = await prove_as_server(trio.SocketStream(connection), self._secret, self._remote.place.listener)
        except (Impostor, Unreadable) as error:
            return str(error)
        except (PeerGone, OSError, trio.BrokenResourceError):
            return "it went away"
        if not _is_whole(name):
            return "it is a stream of a connection by TCP"
        if not self._remote.has_room:
            return "there are too many connections"
        self._remote.offer(UnixLink(connection, on_close=self._remote.note_closed))
        return ""


class NodeNetwork:
    """The way to engines of this node and of others, and from them."""

    def __init__(
        self, host: str, secret: bytes, tls: LinkTls | None = None, ports: tuple[int, int] | None = None
    ) -> None:
        """`host`: the address by which engines of other nodes reach this one."""
        self._remote = TcpNetwork(host, secret, tls, ports=ports)
        self._secret = secret

    def listen(self) -> NodeListener:
        """Raises OSError, NoPeerPort, and CheckpointError if TLS's files cannot be used."""
        remote = self._remote.listen()
        try:
            return NodeListener(remote, self._secret)
        except OSError:
            remote.close()
            raise

    async def connect(self, address: str) -> PeerLink:
        remote, _, here = address.partition("#")
        place = PeerAddress.parse(remote)
        match = _HERE.fullmatch(here)
        if match is not None and match[1] == boot_id():
            with trio.move_on_after(ANSWER_S):
                if (link := await self._connect_here(place, match[2])) is not None:
                    return link
        return await self._remote.connect(remote)

    async def _connect_here(self, place: PeerAddress, name: str) -> PeerLink | None:
        """Connect to an engine of this machine; return None if that cannot be done."""
        try:
            connected = await connect_to(name)
        except (OSError, LinkLost):  # it is in another network namespace, or gone
            return None
        stream_name = StreamName(place.listener, secrets.token_bytes(ID_BYTES), 0, 1)
        is_proved = False
        try:
            await prove_as_client(trio.SocketStream(connected), self._secret, stream_name)
            is_proved = True
        except (Impostor, PeerGone, trio.BrokenResourceError) as error:
            log.warning("peer.not_here", reason=str(error))
            return None
        finally:
            if not is_proved:
                connected.close()
        return UnixLink(connected, expects_memory=True)


def _is_whole(name: StreamName) -> bool:
    """Whether a connection has this stream alone, which none by TCP has."""
    return name.number == 0 and name.num_streams == 1


def _tell(address: str, reason: str, num_refused: int) -> None:
    log.warning("peer.refused", address=address, reason=reason, num_refused=num_refused)
