"""Connections between a host and its engine in virtual time, which carry the bytes of real frames.

    host ══ Wire ══ engine      two `WireEnd`s; each direction is a `Lane`

A wire can be held (nothing arrives, nothing is closed: a partition; after the first bytes no more can be sent), cut
after any number of bytes, or made to repeat or to lose whole frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import attrs
import trio
import trio.abc

_LENGTH = struct.Struct("<I")


@attrs.define(eq=False)
class Lane:
    """One direction of a wire."""

    waiting: bytearray = attrs.field(factory=bytearray)
    is_closed: bool = False
    bytes_until_cut: int | None = None
    """The wire is cut once this many more bytes were sent. None: it is not."""
    frames_to_repeat: int = 0
    """So many of the next reports come twice."""
    frames_to_lose: int = 0
    """So many of the next reports do not come."""
    num_sent: int = 0
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def wake(self) -> None:
        self._changed.unpark_all()

    async def wait(self) -> None:
        await self._changed.park()


@attrs.define(eq=False)
class Wire:
    """A connection. `to_host` carries reports, `to_engine` what the engine is told."""

    is_report: Callable[[bytes], bool]
    """Whether a frame is one that may be lost or repeated."""
    to_host: Lane = attrs.field(factory=Lane)
    to_engine: Lane = attrs.field(factory=Lane)
    is_held: bool = False

    def ends(self) -> tuple[WireEnd, WireEnd]:
        """Return the host's end and the engine's."""
        return WireEnd(self, self.to_engine, self.to_host), WireEnd(self, self.to_host, self.to_engine)

    def hold(self) -> None:
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False
        for lane in (self.to_host, self.to_engine):
            lane.wake()

    def cut(self) -> None:
        """Close both directions; what was sent and has not been received still arrives, as with a socket."""
        for lane in (self.to_host, self.to_engine):
            lane.is_closed = True
        self.let_go()

    def mend(self) -> None:
        """Forget the faults that are yet to come."""
        for lane in (self.to_host, self.to_engine):
            lane.bytes_until_cut, lane.frames_to_repeat, lane.frames_to_lose = None, 0, 0

    def put(self, lane: Lane, data: bytes) -> None:
        if lane is self.to_host and (lane.frames_to_repeat or lane.frames_to_lose):
            data = b"".join(self._disturb(lane, frame) for frame in _frames(data))
        left = lane.bytes_until_cut
        if left is not None and len(data) >= left:
            lane.waiting += data[:left]
            self.cut()
            return
        if left is not None:
            lane.bytes_until_cut = left - len(data)
        lane.waiting += data
        lane.num_sent += len(data)
        lane.wake()

    def _disturb(self, lane: Lane, frame: bytes) -> bytes:
        if not self.is_report(frame):
            return frame
        if lane.frames_to_lose:
            lane.frames_to_lose -= 1
            return b""
        if lane.frames_to_repeat:
            lane.frames_to_repeat -= 1
            return 2 * frame
        return frame


def _frames(data: bytes) -> list[bytes]:
    """Cut what one call has sent into frames. What is not one (a greeting) stays whole."""
    frames, at = [], 0
    while at + _LENGTH.size <= len(data):
        end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            break
        frames.append(data[at:end])
        at = end
    return [*frames, data[at:]] if at < len(data) else frames


@attrs.define(eq=False)
class Plug:
    """What stands for a socket: of it, only `shutdown` is used."""

    _end: WireEnd

    def shutdown(self, _: int) -> None:
        lane = self._end.sending
        lane.is_closed = True
        lane.wake()


@attrs.define(eq=False)
class WireEnd(trio.abc.Stream):
    """One end of a wire; what FrameReader and FrameWriter need of a stream."""

    wire: Wire
    sending: Lane
    receiving: Lane
    is_closed: bool = False

    @property
    def socket(self) -> Any:
        return Plug(self)

    async def send_all(self, data: Any) -> None:
        await trio.lowlevel.checkpoint()
        while self.wire.is_held and self.sending.waiting and not (self.is_closed or self.sending.is_closed):
            await self.sending.wait()  # what nobody takes fills the way
        if self.is_closed:
            raise trio.ClosedResourceError
        if self.sending.is_closed:
            raise trio.BrokenResourceError
        self.wire.put(self.sending, bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        lane = self.receiving
        while not self.is_closed and (self.wire.is_held or not (lane.waiting or lane.is_closed)):
            await lane.wait()
        if self.is_closed:
            raise trio.ClosedResourceError
        data = bytes(lane.waiting[:max_bytes])
        del lane.waiting[: len(data)]
        return data

    async def aclose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.sending.is_closed = self.receiving.is_closed = True
            for lane in (self.sending, self.receiving):
                lane.wake()
        await trio.lowlevel.checkpoint()
