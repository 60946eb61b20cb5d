"""Fetches blocks from other engines, for moves whose source is a peer.

Part of `traffic.py`. One connection an engine, on which any number of fetches are under way; threads copy what comes
from the connection's buffers to the device.

What must always hold: a block counts as moved only if the peer has named the key that was asked for, its bits depend on
the same numerics, and all its bytes were written; a peer that is silent for too long is given up; nothing is being
written when a fetch is over.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Final

import attrs
import trio

from ...messages.mover import Move, Moved, MoveFailed, MoveResult
from ...messages.tiers import LoadFailure
from ..mover.peer_copies import CopyFailed, PeerCopies
from .peer_link import Drop, Hello, Here, Hurry, LinkLost, Over, PeerLink, PeerNetwork, Want
from .peer_server import LONGEST_WAIT_S, Call

SILENCE_S: Final = 10.0
"""How long a peer that need not wait for anything may send nothing."""
CONNECT_S: Final = 5.0
SHORTEST_PAUSE_S: Final = 1.0
PAUSES: Final = 10
"""How many times as long as a vain attempt to connect has taken none follows: sequences wait for each."""
COPIED_TOGETHER: Final = 2
"""Buffers that are emptied at a time for one fetch: what surrounds a copy takes no time then."""


@attrs.frozen
class _Hurried:
    """The fetch is not to wait for blocks that are being computed, from now on."""


@attrs.frozen
class _Lost:
    reason: str


_Event = Here | Over | _Hurried | _Lost


@attrs.define(eq=False)
class _Connection:
    link: PeerLink
    is_lost: bool = False
    fetches: dict[int, trio.MemorySendChannel[_Event]] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Fetch:
    connection: _Connection
    events: trio.MemoryReceiveChannel[_Event]
    patience_s: float


@attrs.define(eq=False)
class _Beginning:
    """What was said of a fetch before it had a connection."""

    is_hurried: bool = False
    is_ended: bool = False


@attrs.frozen
class _Vain:
    """An attempt to connect that failed."""

    reason: str
    retry_at: float


@attrs.define(eq=False)
class _Arrived:
    """What has come for one move."""

    move: Move
    num_expected: int = 0
    """Blocks that have come, in order..."""
    copied: dict[int, int] = attrs.field(factory=dict)
    """...and those that were copied, as ranges of their indexes."""
    places: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(COPIED_TOGETHER))

    def expects(self, here: Here) -> bool:
        """Return whether these are the next blocks that are wanted."""
        wanted = self.move.keys[self.num_expected : self.num_expected + len(here.keys)]
        return bool(here.keys) and here.first == self.num_expected and here.keys == wanted

    @property
    def num_copied(self) -> int:
        """Leading blocks that were copied."""
        end = 0
        while end in self.copied:
            end = self.copied[end]
        return end


class PeerClient:
    """The fetches of one engine."""

    def __init__(self, network: PeerNetwork, copies: PeerCopies, call: Call, nursery: trio.Nursery) -> None:
        self._network = network
        self._copies = copies
        self._call = call
        self._nursery = nursery
        self._connections: dict[str, _Connection] = {}
        self._connecting: dict[str, trio.Lock] = {}
        self._vain: dict[str, _Vain] = {}
        """The last attempt, if it failed, by the address."""
        self._beginning: dict[int, _Beginning] = {}
        """By the number of the move, until they have a connection."""
        self._fetches: dict[int, _Fetch] = {}
        """Those that have one."""

    def expect(self, number: int) -> None:
        """Note that a fetch begins."""
        self._beginning[number] = _Beginning()

    async def fetch(self, move: Move) -> MoveResult:
        """Carry out a move from a peer, which was expected. What does not come is missing."""
        assert move.peer is not None
        started = time.perf_counter()
        arrived = _Arrived(move)
        error: str | None = None
        try:
            try:
                connection = await self._connection(move.peer.address)
            finally:
                beginning = self._beginning.pop(move.number)
            if not beginning.is_ended:
                await self._fetch(arrived, connection, waits=move.waits and not beginning.is_hurried)
        except* (LinkLost, CopyFailed, OSError) as lost:
            error = f"{type(lost.exceptions[0]).__name__}: {lost.exceptions[0]}"
        moved = list(range(arrived.num_copied))
        if len(moved) == len(move.keys):
            return Moved(move.number, time.perf_counter() - started)
        return MoveFailed(move.number, moved, {len(moved): LoadFailure.MISSING}, error)

    async def _fetch(self, arrived: _Arrived, connection: _Connection, *, waits: bool) -> None:
        move = arrived.move
        number = move.number
        send, events = trio.open_memory_channel[_Event](math.inf)
        connection.fetches[number] = send
        fetch = self._fetches[number] = _Fetch(connection, events, LONGEST_WAIT_S if waits else SILENCE_S)
        self._copies.forget(move.targets)
        is_over = False
        try:
            await connection.link.send(Want(number, move.keys, waits))
            async with trio.open_nursery() as copying:
                while not is_over:
                    with trio.move_on_after(fetch.patience_s) as silence:
                        event = await events.receive()
                    if silence.cancelled_caught:
                        raise LinkLost(f"the peer sent nothing for {fetch.patience_s:g} s")
                    match event:
                        case Here():
                            await arrived.places.acquire()
                            copying.start_soon(self._take, event, arrived, connection)
                        case Over():
                            is_over = True
                        case _Hurried():
                            fetch.patience_s = SILENCE_S
                        case _Lost(reason):
                            raise LinkLost(reason)
        finally:
            del connection.fetches[number], self._fetches[number]
            if not (is_over or connection.is_lost):
                self._tell(connection, Drop(number))
            while events.statistics().current_buffer_used:
                if isinstance(event := events.receive_nowait(), Here):
                    self._tell(connection, event)

    async def _take(self, here: Here, arrived: _Arrived, connection: _Connection) -> None:
        """Copy blocks that have come to the device. Raises LinkLost and CopyFailed."""
        move, link = arrived.move, connection.link
        end = here.first + len(here.keys)
        try:
            if not arrived.expects(here):
                raise LinkLost("the peer sent other blocks than were asked for")
            arrived.num_expected = end
            memory = link.blocks_of(here)
            if len(memory) < len(here.keys) * self._copies.block_bytes:
                raise LinkLost("the peer sent too few bytes")
            await self._call(self._copies.copy_in, move.targets[here.first : end], here.keys, memory)
            arrived.copied[here.first] = end
        finally:
            arrived.places.release()
            self._tell(connection, here)

    def hurry(self, number: int) -> bool:
        """Have a fetch wait for nothing that is being computed. Return whether it was under way."""
        if (beginning := self._beginning.get(number)) is not None:
            beginning.is_hurried = True
            return True
        if (fetch := self._fetches.get(number)) is None:
            return False
        self._tell(fetch.connection, Hurry(number))
        fetch.connection.fetches[number].send_nowait(_Hurried())
        return True

    def end(self, number: int) -> None:
        """Have a fetch end early. Ignored if it is over."""
        if (beginning := self._beginning.get(number)) is not None:
            beginning.is_ended = True
        elif (fetch := self._fetches.get(number)) is not None:
            self._tell(fetch.connection, Drop(number))
            fetch.connection.fetches[number].send_nowait(_Hurried())

    def _tell(self, connection: _Connection, message: Hurry | Drop | Here) -> None:
        """Send a message, or give back the buffer of one, soon, if the connection still exists then."""

        async def send() -> None:
            with suppress(LinkLost):  # the reader of the connection says so
                if isinstance(message, Here):
                    await connection.link.give_back(message)
                else:
                    await connection.link.send(message)

        self._nursery.start_soon(send)

    # ------------------------------------------------------------ connections

    async def _connection(self, address: str) -> _Connection:
        """Return the connection to an engine. Raises LinkLost and OSError."""
        async with self._connecting.setdefault(address, trio.Lock()):
            if (connection := self._connections.get(address)) is not None:
                return connection
            begun = trio.current_time()
            if (vain := self._vain.pop(address, None)) is not None and begun < vain.retry_at:
                self._vain[address] = vain
                raise LinkLost(f"no connection a moment ago: {vain.reason}")
            try:
                link = await self._connect(address)
            except (LinkLost, OSError) as error:
                now = trio.current_time()
                self._vain[address] = _Vain(str(error), now + max(SHORTEST_PAUSE_S, PAUSES * (now - begun)))
                raise
            connection = self._connections[address] = _Connection(link)
            self._nursery.start_soon(self._read, address, connection)
            return connection

    async def _connect(self, address: str) -> PeerLink:
        with trio.move_on_after(CONNECT_S):
            link = await self._network.connect(address)
            try:
                hello = await link.receive()
                self._check(hello)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await link.close()
                raise
            return link
        raise LinkLost(f"no connection within {CONNECT_S:g} s")

    def _check(self, hello: object) -> None:
        if not isinstance(hello, Hello):
            raise LinkLost(f"the peer began with {type(hello).__name__}")
        if hello.numerics != self._copies.numerics:
            raise LinkLost("the peer computes other bits")
        if hello.buffer_bytes < self._copies.block_bytes:
            raise LinkLost(f"the peer has buffers of {hello.buffer_bytes} bytes")

    async def _read(self, address: str, connection: _Connection) -> None:
        """Pass on what comes, until the connection is lost."""
        link, reason = connection.link, "the peer is gone"
        try:
            while True:
                match await link.receive():
                    case (Here(number) | Over(number)) as event:
                        if (fetch := connection.fetches.get(number)) is not None:
                            fetch.send_nowait(event)
                        elif isinstance(event, Here):
                            await link.give_back(event)
                    case other:
                        raise LinkLost(f"the peer sent {type(other).__name__}, which only clients send")
        except LinkLost as error:
            reason = str(error)
        finally:
            connection.is_lost = True
            del self._connections[address]
            for fetch in connection.fetches.values():
                fetch.send_nowait(_Lost(reason))
            with trio.CancelScope(shield=True):
                await link.close()
