"""The host of an engine in a process of its own: starts it, carries its messages, and sees how it ends.

Run by the supervisor, once an engine. An engine that hangs is killed (`pulse.py` judges): it says nothing any
more, or one step takes too long.

What must always hold: when `run` returns, the process has ended, and everything that it said has been delivered.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import msgspec
import trio

from ..channel import FrameReader, FrameWriter, PeerGone
from ..config import EngineConfig
from ..messages.supervisor import Alive
from ..supervisor import Death, EngineLink
from .child import OWN_GROUP, kill_group
from .pulse import TICK_S, Pulse


class ProcessHost:
    """Runs the engine in a process of its own, over a stream socket pair whose end of file is its death.

    An engine that hangs once it is ready is killed. While it loads, its silence says nothing.
    """

    STOP_GRACE_S = 2.0
    MODULE = "quipu.actors.processes.engine_process"
    """What the process runs; a benchmark's own runs this one, and watches it."""

    def __init__(self, config: EngineConfig, environment: dict[str, str], *, step_timeout_s: float = 0.0) -> None:
        """`step_timeout_s`: how long a step may take before the engine counts as hung; 0 is for ever."""
        self._config = config
        self._environment = environment
        self._step_timeout_s = step_timeout_s
        self.process: trio.Process | None = None

    async def run(self, link: EngineLink) -> Death:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            return _no_start(error)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        async with stream:
            with theirs:
                try:
                    process = await self._start(theirs.fileno(), link.incarnation)
                except (OSError, MemoryError) as error:
                    return _no_start(error)
            self.process = process
            try:
                hung = await self._talk(link, stream, process)
                link.lost(hung or "its connection has closed")
                with trio.move_on_after(self.STOP_GRACE_S):
                    await process.wait()
            finally:
                self.process = None
                await self._stop(process, stream)
        if link.refusal is not None:
            return Death(link.refusal, hopeless=True)
        if hung is not None:
            return Death(hung)
        return _explain(process.returncode)

    async def _start(self, descriptor: int, incarnation: int) -> trio.Process:
        config = msgspec.json.encode(self._config).decode()
        return await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", self.MODULE, str(descriptor), str(incarnation), config],
            pass_fds=(descriptor,),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            process_group=OWN_GROUP,
        )

    async def _talk(self, link: EngineLink, stream: trio.SocketStream, process: trio.Process) -> str | None:
        """Carry messages both ways until the engine's end closes. Returns why it was killed, if it was because it hung.

        A killed one's last messages are still read: what it had done counts.
        """
        reader = FrameReader(stream, link.incarnation)
        writer = FrameWriter(stream, link.incarnation)
        pulse = Pulse(self._step_timeout_s)
        is_reading = False
        hung: str | None = None

        async def write() -> None:
            try:
                while True:
                    await writer.send_all(await link.take())
            except PeerGone:
                pass  # the reader sees it too, after the last report

        async def watch() -> None:
            nonlocal hung
            last = trio.current_time()
            while hung is None:
                await trio.sleep(TICK_S)
                now = trio.current_time()
                hung = pulse.pass_time(now - last, could_hear=is_reading and link.is_ready)
                last = now
            link.lost(hung)
            kill_group(process.pid)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(watch)
            try:
                while True:
                    is_reading = True
                    messages = await reader.receive_all()
                    is_reading = False
                    pulse.hear()
                    for message in messages:
                        if isinstance(message, Alive):
                            pulse.note(message)
                    await link.deliver(messages)
            except PeerGone:
                nursery.cancel_scope.cancel()
        return hung

    async def _stop(self, process: trio.Process, stream: trio.SocketStream) -> None:
        """Ask (close its socket), wait a while, kill."""
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                await trio.aclose_forcefully(stream)
                with trio.move_on_after(self.STOP_GRACE_S):
                    await process.wait()
            if process.returncode is None:
                kill_group(process.pid)
            await process.wait()


def _explain(returncode: int | None) -> Death:
    if returncode is not None and returncode < 0:
        return Death(f"killed by {signal.Signals(-returncode).name}")
    if returncode == os.EX_TEMPFAIL:
        return Death("there was too little memory, or too few descriptors, to load it", is_shortage=True)
    return Death(f"its process ended with exit code {returncode}")


def _no_start(error: OSError | MemoryError) -> Death:
    return Death(f"no engine can be started: {error or type(error).__name__}", is_shortage=True)
