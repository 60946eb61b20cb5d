"""Fetches blocks from other engines, for moves whose source is a peer.

Part of `traffic.py`. One connection an engine (`peer_connections.py`), on which any number of fetches are under way;
threads copy what comes, from the connection's buffers or the peer's cache, to the device.

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
from .lender import LONGEST_WAIT_S, Call
from .peer_connections import SILENCE_S, Confirmation, Connection, FetchEvent, Hurried, Lost, PeerConnections
from .peer_link import Drop, Here, Hurry, LinkLost, Over, PeerNetwork, Want

COPIED_TOGETHER: Final = 2
"""Buffers that are emptied at a time for one fetch: what surrounds a copy takes no time then."""


@attrs.define(eq=False)
class _Fetch:
    connection: Connection
    patience_s: float


@attrs.define(eq=False)
class _Beginning:
    """What was said of a fetch before it had a connection."""

    is_hurried: bool = False
    is_ended: bool = False


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
        self._connections = PeerConnections(network, copies, nursery)
        self._copies = copies
        self._call = call
        self._nursery = nursery
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
                connection = await self._connections.get(move.peer.address)
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

    async def _fetch(self, arrived: _Arrived, connection: Connection, *, waits: bool) -> None:
        move = arrived.move
        number = move.number
        send, events = trio.open_memory_channel[FetchEvent](math.inf)
        connection.fetches[number] = send
        fetch = self._fetches[number] = _Fetch(connection, LONGEST_WAIT_S if waits else SILENCE_S)
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
                        case Hurried():
                            fetch.patience_s = SILENCE_S
                        case Lost(reason):
                            raise LinkLost(reason)
        finally:
            del connection.fetches[number], self._fetches[number]
            if not (is_over or connection.is_lost):
                self._tell(connection, Drop(number))
            while events.statistics().current_buffer_used:
                if isinstance(event := events.receive_nowait(), Here):
                    self._tell(connection, event)

    async def _take(self, here: Here, arrived: _Arrived, connection: Connection) -> None:
        """Copy blocks that have come to the device. Raises LinkLost and CopyFailed."""
        move = arrived.move
        end = here.first + len(here.keys)
        confirmation: Confirmation | None = None
        try:
            if not arrived.expects(here):
                raise LinkLost("the peer sent other blocks than were asked for")
            arrived.num_expected = end
            targets = move.targets[here.first : end]
            if connection.shares_cache:
                if len(here.blocks) != len(here.keys):
                    raise LinkLost("the peer does not say where the blocks are")
                confirmation = connection.await_kept(here.buffer)
                await self._call(self._copies.copy_across, connection.link.cache(), here.blocks, targets)
            else:
                memory = connection.link.blocks_of(here)
                if len(memory) < len(here.keys) * self._copies.block_bytes:
                    raise LinkLost("the peer sent too few bytes")
                await self._call(self._copies.copy_in, targets, here.keys, memory)
        finally:
            arrived.places.release()
            self._tell(connection, here)
        if confirmation is not None:
            end = here.first + min(len(here.keys), await confirmation.num_kept())
            self._copies.confirm(move.targets[here.first : end], move.keys[here.first : end])
        if end > here.first:
            arrived.copied[here.first] = end

    def hurry(self, number: int) -> bool:
        """Have a fetch wait for nothing that is being computed. Return whether it was under way."""
        if (beginning := self._beginning.get(number)) is not None:
            beginning.is_hurried = True
            return True
        if (fetch := self._fetches.get(number)) is None:
            return False
        self._tell(fetch.connection, Hurry(number))
        fetch.connection.fetches[number].send_nowait(Hurried())
        return True

    def end(self, number: int) -> None:
        """Have a fetch end early. Ignored if it is over."""
        if (beginning := self._beginning.get(number)) is not None:
            beginning.is_ended = True
        elif (fetch := self._fetches.get(number)) is not None:
            self._tell(fetch.connection, Drop(number))
            fetch.connection.fetches[number].send_nowait(Hurried())

    def _tell(self, connection: Connection, message: Hurry | Drop | Here) -> None:
        """Send a message, or give back the buffer of one, soon, if the connection still exists then."""

        async def send() -> None:
            with suppress(LinkLost):  # the reader of the connection says so
                if isinstance(message, Here):
                    await connection.link.give_back(message)
                else:
                    await connection.link.send(message)

        self._nursery.start_soon(send)
