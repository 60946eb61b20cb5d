"""How an engine process that has lost its connection gets another one.

A `Listener` belongs to the host of one engine process (`connected_host.py`), a `WayBack` to that process
(`engine_server.py`). The listener has an address, and a lifeline: a pipe of which the process has the reading end. It
brings the process a token, and closes when the web process ends or wants the engine to end.

    engine ─▶ host   connects; version (`greeting.py`), token
    host ─▶ engine   incarnation, 4 bytes
    engine ─▶ host   one byte, if it still waits on this connection; frames follow in both directions

When a network is whole again, several connections may arrive at once, of which the engine has given up all but one.

What must always hold: only a process that was given the token is admitted, on one connection; once the lifeline is
closed none is, so that no engine waits for a web process that is gone.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from hmac import compare_digest
from typing import Protocol

import attrs
import trio

from ..frames import PeerGone, Unreadable
from .greeting import OtherVersion, receive_greeting, send_greeting

TOKEN_BYTES = 32
_INCARNATION = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_AGREED = b"!"
BACKLOG = 8
GREETING_S = 2.0
"""How long a connected process may take to say who it is."""
ATTEMPT_S = 8.0
"""How long an engine waits on one connection to be admitted: the way to the host may be cut."""
RETRY_S = 0.1
REJOIN_S = 2.0
"""How long a host waits for a local process that has lost its connection."""
MAX_ALONE_S = 300.0
"""How long an engine tries. Its host decides how long it waits for it, and ends it otherwise."""


class Listener:
    """Where one engine process may connect again. Implements `engine_child.Entrance`."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind("")  # the kernel chooses an abstract name, which vanishes with the socket
            self._socket.listen(BACKLOG)
            self.lifeline, self._our_end = os.pipe()
        except OSError:
            self._socket.close()
            raise
        self._accepting = trio.socket.from_stdlib_socket(self._socket)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        os.write(self._our_end, self._token)

    @property
    def address(self) -> str:
        name: bytes = self._socket.getsockname()
        return name.hex()

    async def wait_for_caller(self) -> None:
        await trio.lowlevel.wait_readable(self._socket)

    async def admit(self, incarnation: int) -> trio.SocketStream:
        while True:
            try:
                connection, _ = await self._accepting.accept()
            except OSError:  # there are not enough file descriptors, or the caller has gone
                await trio.sleep(RETRY_S)
                continue
            stream = trio.SocketStream(connection)
            is_admitted = False
            try:
                with trio.move_on_after(GREETING_S):
                    if _is_same_user(stream.socket) and await self._has_token(stream):
                        is_admitted = await tell_incarnation(stream, incarnation)
            except (PeerGone, Unreadable, OtherVersion, trio.BrokenResourceError):
                continue
            finally:
                if not is_admitted:
                    await trio.aclose_forcefully(stream)
            if is_admitted:
                return stream

    async def _has_token(self, stream: trio.SocketStream) -> bool:
        await receive_greeting(stream)
        return compare_digest(await receive_exactly(stream, TOKEN_BYTES), self._token)

    def close_lifeline_of_child(self) -> None:
        """Close this process's copy of the reading end, which the engine process has by now."""
        os.close(self.lifeline)

    def close(self) -> None:
        self._accepting.close()
        os.close(self._our_end)


@attrs.frozen
class Admission:
    stream: trio.SocketStream
    incarnation: int


class Way(Protocol):
    """How an engine process finds its host: `WayBack`, or `tcp_way.TcpWay` to another machine."""

    def is_open(self) -> bool:
        """Return whether the host may still want this process."""

    async def connect(self) -> Admission | None:
        """Connect to the host until it admits this process as another incarnation. None: it does not want to."""


@attrs.define(eq=False)
class WayBack:
    """What an engine process knows of its host's listener."""

    _lifeline: int
    _address: str
    _token: bytes = attrs.field(default=b"", init=False)

    def is_open(self) -> bool:
        return is_held(self._lifeline)

    async def connect(self) -> Admission | None:
        self._token = self._token or os.read(self._lifeline, TOKEN_BYTES)
        with trio.move_on_after(MAX_ALONE_S):
            while self.is_open():
                try:
                    with trio.move_on_after(ATTEMPT_S):
                        return await self._connect_once()
                except ConnectionRefusedError:
                    return None
                except (OSError, PeerGone, trio.BrokenResourceError):
                    await trio.sleep(RETRY_S)
        return None

    async def _connect_once(self) -> Admission:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(bytes.fromhex(self._address))  # at once, unless the backlog is full
        except OSError:
            connection.close()
            raise
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        try:
            if not _is_same_user(stream.socket):
                raise PeerGone("another user listens there")
            send_greeting(connection)
            await stream.send_all(self._token)
            incarnation = await learn_incarnation(stream)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return Admission(stream, incarnation)


async def tell_incarnation(stream: trio.SocketStream, incarnation: int) -> bool:
    """Tell an engine its incarnation. Returns whether it still waits on this connection."""
    await stream.send_all(_INCARNATION.pack(incarnation))
    return await receive_exactly(stream, 1) == _AGREED


async def learn_incarnation(stream: trio.SocketStream) -> int:
    """Wait until the host tells this engine its incarnation, and agree."""
    incarnation: int
    (incarnation,) = _INCARNATION.unpack(await receive_exactly(stream, _INCARNATION.size))
    await stream.send_all(_AGREED)
    return incarnation


def is_held(lifeline: int) -> bool:
    """Return whether the other end of a lifeline is open."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return not poll.poll(0)


def _is_same_user(connection: trio.socket.SocketType) -> bool:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    credentials: tuple[int, int, int] = _CREDENTIALS.unpack(packed)
    return credentials[1] == os.geteuid()


async def receive_exactly(stream: trio.abc.ReceiveStream, num_bytes: int) -> bytes:
    """Read exactly this many bytes. Raises PeerGone at end of file."""
    received = b""
    while len(received) < num_bytes:
        data = await stream.receive_some(num_bytes - len(received))
        if not data:
            raise PeerGone("end of file")
        received += data
    return received
