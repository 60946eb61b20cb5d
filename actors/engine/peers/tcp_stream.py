"""One TCP connection between two engines, secured with TLS or not: for messages, by the loop, or for bytes, by threads.

Used by `tcp_link.py`. Bytes are sent and received by the kernel, or by OpenSSL, without the GIL, as many at a time as
these take: without TLS a call carries all that is left, however often its thread sleeps meanwhile.

What must always hold: a call in a thread ends within a moment, whatever the other end does; bytes count as received
only if they have the checksum from when they were sent; the descriptor is closed only when no thread uses it.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from ...fleet.processes.link_handshake import Impostor, prepare
from ...fleet.processes.link_tls import fault_of
from ...threads import run_in_thread
from ..mover.block_header import checksum_of
from .peer_link import LinkLost

R = TypeVar("R")

PAUSE_S: Final = 0.05
"""How long a thread waits for more; then the loop does."""
SLICE_S: Final = 0.25
"""How long a thread carries bytes before it can be cancelled."""
SEALED_TOGETHER: Final = 1 << 18
"""Bytes that OpenSSL encrypts in one call."""
SENT_TOGETHER: Final = 1 << 18
"""Bytes of messages that are sent before the loop gets to run."""
_TIMEOUT: Final = struct.Struct("@ll")
_CHECKSUM: Final = struct.Struct("<Q")
GONE: Final = "the other engine is gone"


class TcpStream(trio.abc.Stream):
    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prepare(connected)
        self._socket = connected
        self._is_closed = False
        self._in_thread = trio.Lock()
        """Held while a thread uses the socket."""
        self._limiter = trio.CapacityLimiter(1)

    @classmethod
    def take(cls, connection: trio.socket.SocketType) -> TcpStream:
        """Take over one of trio's sockets. Raises OSError."""
        taken = socket.socket(fileno=connection.detach())
        try:
            return cls(taken)
        except OSError:
            taken.close()
            raise

    async def secure(self, context: ssl.SSLContext | None, called: str | None) -> None:
        """Agree upon TLS, where there is a context. `called`: the address that was called; None where it was.

        Raises Impostor.
        """
        if context is None:
            return
        secured = context.wrap_socket(
            self._socket, server_side=called is None, server_hostname=called, do_handshake_on_connect=False
        )
        self._socket = secured

        async def shake_hands() -> None:  # each step computes for milliseconds
            async with self._in_thread:
                await run_in_thread(secured.do_handshake, limiter=self._limiter)

        try:
            await self._when_possible(shake_hands, trio.lowlevel.wait_readable)
        except trio.BrokenResourceError as error:
            raise Impostor(fault_of(error) or "it went away before TLS was agreed upon") from error

    # ------------------------------------------------------------ messages

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        async def send() -> int:
            return self._socket.send(rest[:SENT_TOGETHER])

        rest = memoryview(data)
        while rest:
            rest = rest[await self._when_possible(send, trio.lowlevel.wait_writable) :]
            await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.wait_writable(self._socket)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        async def receive() -> bytes:
            return self._socket.recv(max_bytes or SENT_TOGETHER)

        await trio.lowlevel.checkpoint()
        return await self._when_possible(receive, trio.lowlevel.wait_readable)

    async def _when_possible(
        self, call: Callable[[], Awaitable[R]], wait: Callable[[socket.socket], Awaitable[None]]
    ) -> R:
        """Call until it need not wait any more. `wait` is what to do where the kernel does not say what for."""
        while True:
            if self._is_closed:
                raise trio.ClosedResourceError(GONE)
            try:
                return await call()
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._socket)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self._socket)
            except BlockingIOError:
                await wait(self._socket)
            except OSError as error:
                raise trio.BrokenResourceError(GONE) from error

    # ------------------------------------------------------------ bytes

    def begin_carrying(self) -> None:
        """Use the stream for bytes, and for no messages any more. Raises OSError."""
        if not isinstance(self._socket, ssl.SSLSocket):
            pause = _TIMEOUT.pack(0, int(PAUSE_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pause)
            self._socket.setblocking(True)  # the kernel returns after a pause

    async def send_share(self, share: memoryview, silence_s: float) -> None:
        """Send memory and its checksum. Raises LinkLost, also if the other end takes nothing for too long."""
        is_sealed = isinstance(self._socket, ssl.SSLSocket)
        left = deque((share,))
        has_begun = False

        def send(part: memoryview) -> int:
            return self._socket.send(part[:SEALED_TOGETHER] if is_sealed else part)

        def work() -> bool:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                left.append(memoryview(_CHECKSUM.pack(checksum_of(share))))
            return self._carry_a_while(left, send, select.POLLOUT)

        await self._carry(left, work, trio.lowlevel.wait_writable, silence_s)

    async def receive_share(self, share: memoryview, silence_s: float) -> None:
        """Fill memory with what has the checksum. Raises LinkLost, also if nothing comes for too long."""
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        checksum = memoryview(bytearray(_CHECKSUM.size))
        left = deque((share, checksum))

        def receive(part: memoryview) -> int:
            return self._socket.recv_into(part, len(part), flags)

        def work() -> bool:
            is_stalled = self._carry_a_while(left, receive, select.POLLIN)
            if not left and checksum != _CHECKSUM.pack(checksum_of(share)):
                raise LinkLost("bytes were changed on the way")
            return is_stalled

        await self._carry(left, work, trio.lowlevel.wait_readable, silence_s)

    async def _carry(
        self,
        left: deque[memoryview],
        work: Callable[[], bool],
        wait: Callable[[socket.socket], Awaitable[None]],
        silence_s: float,
    ) -> None:
        """Have threads work until nothing is left. `work` returns whether to `wait` first."""
        async with self._in_thread:
            while left:
                if self._is_closed:
                    raise LinkLost(GONE)
                if await run_in_thread(work, limiter=self._limiter):
                    with trio.move_on_after(silence_s) as silence:
                        await wait(self._socket)
                    if silence.cancelled_caught:
                        raise LinkLost(f"the peer neither took nor sent bytes for {silence_s:g} s")

    def _carry_a_while(self, left: deque[memoryview], step: Callable[[memoryview], int], event: int) -> bool:
        """Carry the first bytes of what is left, and remove them. Return whether nothing can be carried now."""
        until = time.monotonic() + SLICE_S
        try:
            while left and time.monotonic() < until:
                try:
                    num_bytes = step(left[0])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not self._poll(event):
                        return True
                    continue
                except BlockingIOError:
                    return True
                if not num_bytes:
                    raise LinkLost(GONE)
                if rest := left[0][num_bytes:]:
                    left[0] = rest
                else:
                    left.popleft()
        except OSError as error:
            raise LinkLost(GONE) from error
        return False

    def _poll(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), event)
        return bool(poll.poll(PAUSE_S * 1000))

    # ------------------------------------------------------------ end

    async def aclose(self) -> None:
        """Close the stream, abruptly, as soon as no thread uses it."""
        self.shut_down()
        with trio.CancelScope(shield=True):
            async with self._in_thread:
                if self._socket.fileno() >= 0:
                    trio.lowlevel.notify_closing(self._socket)
                    self._socket.close()
        await trio.lowlevel.checkpoint()

    def shut_down(self) -> None:
        """Have every call end that waits for the other end, and it see the end of the stream."""
        self._is_closed = True
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # `SSLSocket` would read plain text from then on
        except OSError:
            return
