"""One engine process as its host has it: its connection, those that were lost, and the way back.

Used by `connected_host.py`. A process whose connection is lost may go on. Its incarnation is dead then, and what it
still sends on the old connection is only counted. For a while it may connect again, as the next incarnation; otherwise
it is killed.

What must always hold: nothing of a dead incarnation is delivered; a process that is to end finds nobody listening.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Protocol

import attrs
import structlog
import trio

from ..frames import FrameReader, PeerGone, Unreadable
from ..supervisor import Death, EngineLink
from .greeting import OtherVersion

log = structlog.get_logger()

MAX_OLD = 4
"""Lost connections of one process that are still read; the oldest is closed."""


class EngineProcess(Protocol):
    """An engine process, on this machine or another."""

    @property
    def has_ended(self) -> bool: ...

    async def wait(self) -> None:
        """Wait until it has ended."""

    def kill(self) -> None:
        """Kill it, with its children."""

    def step_ids(self) -> tuple[int, ...] | None:
        """Return the sequences of its current or last step; None: it was running none, or that is not known."""

    async def explain(self) -> Death:
        """Return why it has ended."""

    def release(self) -> None:
        """Release what it used, once it has ended."""


class Entrance(Protocol):
    """Where one engine process may connect again: `reconnection.Listener`, or a port for other machines."""

    async def wait_for_caller(self) -> None:
        """Wait until a process has connected."""

    async def admit(self, incarnation: int) -> trio.SocketStream:
        """Wait until the engine process has connected, and tell it its new incarnation. Raises OtherVersion."""

    def close(self) -> None:
        """Admit no process any more, and tell this one to end."""


@attrs.define(eq=False)
class EngineChild:
    process: EngineProcess
    listener: Entrance
    stream: trio.SocketStream | None
    is_greeted: bool = False
    """Whether its version was checked before it was connected."""
    refusal: str | None = None
    """Why it cannot be connected, if it has another version."""
    step_ids: tuple[int, ...] | None = None
    """The sequences of the step during which it died last, if there was one."""
    _old: list[tuple[trio.SocketStream, FrameReader]] = attrs.field(factory=list)
    """Connections of dead incarnations on which something may still arrive, oldest first."""

    async def end(self, grace_s: float) -> None:
        """Ask the process to end by closing what connects it, wait for a while, then kill it."""
        with trio.CancelScope(shield=True):
            self.listener.close()  # first, so that it finds that it is not wanted back
            for stream in (self.stream, *(stream for stream, _ in self._old)):
                if stream is not None:
                    await trio.aclose_forcefully(stream)
            with trio.move_on_after(grace_s):
                await self.process.wait()
            if not self.process.has_ended:
                self.process.kill()
            await self.process.wait()
            self.step_ids = self.process.step_ids()
            self.process.release()

    async def wait_for_caller_or_end(self, timeout_s: float, *, may_call: bool) -> bool:
        """Wait until the process ends or, if it may, connects again. Returns whether it has connected."""
        has_called = False

        async def wait_for_caller() -> None:
            nonlocal has_called
            await self.listener.wait_for_caller()
            has_called = True
            nursery.cancel_scope.cancel()

        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                if may_call:
                    nursery.start_soon(wait_for_caller)
                await self.process.wait()
                nursery.cancel_scope.cancel()
        return has_called

    async def lose(self, reader: FrameReader, *, is_at_end: bool) -> None:
        """Give up the connection; `reader` goes on reading it unless it is at its end."""
        stream, self.stream = self.stream, None
        self.step_ids = self.process.step_ids()
        assert stream is not None
        if is_at_end:
            await trio.aclose_forcefully(stream)
            return
        with suppress(OSError):
            stream.socket.shutdown(socket.SHUT_WR)
        self._old.append((stream, reader))
        while len(self._old) > MAX_OLD:
            await trio.aclose_forcefully(self._old.pop(0)[0])

    async def readmit(self, incarnation: int, timeout_s: float) -> trio.SocketStream | None:
        """Wait until the process connects again, as another incarnation. None: it ended, or did not in time."""

        async def watch() -> None:
            await self.process.wait()
            nursery.cancel_scope.cancel()

        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                try:
                    self.stream = await self.listener.admit(incarnation)
                except OtherVersion as error:
                    self.refusal = str(error)
                nursery.cancel_scope.cancel()
        return self.stream

    async def refuse_old_frames(self, link: EngineLink) -> None:
        """Count what still arrives on lost connections, each until its end."""
        async with trio.open_nursery() as nursery:
            for stream, reader in self._old:
                nursery.start_soon(self._refuse, link, stream, reader)

    async def _refuse(self, link: EngineLink, stream: trio.SocketStream, reader: FrameReader) -> None:
        num_frames = 0
        try:
            while True:
                num_frames += (num := len(await reader.receive_all()))
                link.refuse(num)
        except (PeerGone, Unreadable):
            engine_id, incarnation = link.engine_id, reader.incarnation
            log.info("engine.stale_frames", engine_id=engine_id, incarnation=incarnation, num_frames=num_frames)
        self._old = [one for one in self._old if one[0] is not stream]
        await trio.aclose_forcefully(stream)
