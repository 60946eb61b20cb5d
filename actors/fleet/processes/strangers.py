"""Meets callers that have not proved who they are, at a socket that is open to a network.

Used by `link_port.py` and by the ports at which engines await each other (`engine/peers/tcp_network.py`).

What must always hold: strangers are bounded in number and in time, and those of one address leave room for others; a
refused one is told of, and its place is freed only after a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs
import trio

from .reconnection import GREETING_S, RETRY_S

PENALTY_S = 1.0
LOG_INTERVAL_S = 1.0
THIS_MACHINE = "this machine"
"""The address of all who call at a Unix socket."""
TOO_MANY = "too many callers of this address"


class Tell(Protocol):
    def __call__(self, address: str, reason: str, num_refused: int) -> None:
        """Log that a caller was refused, and how many have been so far."""


@attrs.define(eq=False)
class Strangers:
    judge: Callable[[trio.socket.SocketType], Awaitable[str]]
    """Has a caller prove itself, and keeps its connection; or returns why it is refused."""
    tell: Tell
    """Called once a second at most."""
    max_at_once: int
    """Callers that are judged at one time; further ones wait in the kernel's queue."""
    max_of_address: int
    """Those of one address; further ones are closed."""
    num_refused: int = attrs.field(default=0, init=False)
    _by_address: Counter[str] = attrs.field(factory=Counter, init=False)
    _told_at: float = attrs.field(default=-LOG_INTERVAL_S, init=False)

    @property
    def num_at_once(self) -> int:
        """The number of callers that have not proved themselves yet, refused ones that wait included."""
        return self._by_address.total()

    async def meet(self, accepting: trio.socket.SocketType) -> None:
        """Meet callers until cancelled."""
        places = trio.Semaphore(self.max_at_once)
        async with trio.open_nursery() as nursery:
            while True:
                await places.acquire()
                try:
                    connection, peer = await accepting.accept()
                except OSError:  # there are not enough file descriptors, or the caller has gone
                    places.release()
                    await trio.sleep(RETRY_S)
                    continue
                address = peer[0] if isinstance(peer, tuple) else THIS_MACHINE
                if self._by_address[address] < self.max_of_address:
                    self._by_address[address] += 1
                    nursery.start_soon(self._meet_one, connection, address, places)
                else:
                    connection.close()
                    places.release()
                    self._refuse(address, TOO_MANY)

    async def _meet_one(self, connection: trio.socket.SocketType, address: str, places: trio.Semaphore) -> None:
        is_known = False
        try:
            refusal = "it did not prove itself in time"
            with trio.move_on_after(GREETING_S):
                refusal = await self.judge(connection)
            is_known = not refusal
            if refusal:
                self._refuse(address, refusal)
                await trio.sleep(PENALTY_S)
        finally:
            if not is_known:
                connection.close()
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
            places.release()

    def _refuse(self, address: str, reason: str) -> None:
        self.num_refused += 1
        if trio.current_time() >= self._told_at + LOG_INTERVAL_S:
            self._told_at = trio.current_time()
            self.tell(address, reason, self.num_refused)
