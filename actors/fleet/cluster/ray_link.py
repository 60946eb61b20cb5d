"""One Ray driver process (`ray_driver.py`) as the web process has it.

Used by `ray_nodes.py`. What must always hold: once the driver is gone, every engine process that it has started counts
as ended; no command waits for the driver.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from contextlib import suppress

import msgspec
import structlog
import trio

from ...threads import open_process
from ..processes.child import OWN_GROUP, kill_group
from .ray_messages import Command, End, Ended, Ending, EngineOrder, Event, Failed, Join, Joined, Kill, Placed, Start
from .remote_process import RemoteProcess

log = structlog.get_logger()

DRIVER = "quipu.actors.fleet.cluster.ray_driver"
MAX_LINE_BYTES = 1 << 20
CLOSING_S = 4.0


class DriverGone(Exception):
    """The driver has ended, or could not join the cluster."""


class RayLink:
    """Commands to a driver, and its answers. `run` must be running."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self._process = process
        self._stream = stream
        self._commands, self._to_send = trio.open_memory_channel[Command](math.inf)  # a few for each engine
        self._engines: dict[int, RemoteProcess] = {}
        """By incarnation, until they have ended."""
        self._scope = trio.CancelScope(shield=True)
        self._answered = trio.Event()
        self._ended = trio.Event()
        self.joined: Joined | None = None
        self.is_gone = False
        self._reason = "Ray's driver has ended"

    @classmethod
    async def start(cls) -> RayLink:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            process = await open_process(
                [sys.executable, "-P", "-m", DRIVER],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                process_group=OWN_GROUP,
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    async def run(self) -> None:
        """Carry commands and answers until `close` is called, or the driver ends."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                try:
                    await self._read()
                except (trio.BrokenResourceError, msgspec.DecodeError, ValueError) as error:
                    log.error("ray.driver_unreadable", error=str(error))
                finally:
                    self._note_gone()
                nursery.cancel_scope.cancel()
        self._ended.set()

    async def join(self, join: Join) -> Joined:
        """Have the driver join a cluster. Raises DriverGone."""
        self.send(join)
        await self._answered.wait()
        if self.joined is None:
            raise DriverGone(self._reason)
        return self.joined

    def start_engine(self, order: EngineOrder) -> RemoteProcess:
        number = order.incarnation
        process = RemoteProcess(order, lambda: self.send(End(number)), lambda: self.send(Kill(number)))
        if self.is_gone:
            process.note_ended(Ending(reason=self._reason))
        else:
            self._engines[number] = process
            self.send(Start(order))
        return process

    def send(self, command: Command) -> None:
        """Send a command, if the driver is still there."""
        if not self.is_gone:
            self._commands.send_nowait(command)

    async def close(self) -> None:
        """Have the driver leave the cluster, and end it. Must not be cancelled."""
        with suppress(OSError):  # it has ended
            self._stream.socket.shutdown(socket.SHUT_WR)
        with trio.move_on_after(CLOSING_S):
            await self._process.wait()
        kill_group(self._process.pid)
        await self._process.wait()
        self._scope.cancel()
        await self._ended.wait()
        await trio.aclose_forcefully(self._stream)

    async def _write(self) -> None:
        try:
            async for command in self._to_send:
                await self._stream.send_all(msgspec.json.encode(command) + b"\n")
        except trio.BrokenResourceError:
            return  # which the reader notices

    async def _read(self) -> None:
        decoder = msgspec.json.Decoder(Event)
        buffer = b""
        while data := await self._stream.receive_some():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._handle(decoder.decode(line))
            if len(buffer) > MAX_LINE_BYTES:
                raise ValueError("a line without an end")

    def _handle(self, event: Event) -> None:
        match event:
            case Joined():
                self.joined = event
                self._answered.set()
            case Failed(reason):
                self._reason = reason
            case Placed(incarnation, node) if incarnation in self._engines:
                self._engines[incarnation].note_placed(node)
            case Ended(incarnation, ending) if incarnation in self._engines:
                self._engines.pop(incarnation).note_ended(ending)

    def _note_gone(self) -> None:
        self.is_gone = True
        if self._engines:
            log.error("ray.driver_gone", num_engines=len(self._engines))
        for process in self._engines.values():
            process.note_ended(Ending(reason=self._reason))
        self._engines.clear()
        self._answered.set()
