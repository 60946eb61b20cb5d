"""Hosts an engine in its own process: starts it, relays its messages, and finds out how it ended.

Run by the supervisor, once per engine. An engine that hangs is killed, as judged by `heartbeat.py`: it has been silent
for too long, or one step takes too long. So is one that sends what cannot be read, and one of another version.

What must always hold: when `run` returns, the process has ended and all its messages have been delivered, up to the
first that cannot be read; whatever bytes it sends, `run` returns and does not raise.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import attrs
import msgspec
import trio

from ..engine_config import EngineConfig
from ..frames import FrameReader, FrameWriter, PeerGone, Unreadable
from ..messages.supervisor import Heartbeat
from ..shared.step_record import StepRecord
from ..supervisor import Death, EngineLink
from .child import OWN_GROUP, kill_group
from .cut_off_files import find_cut_off
from .greeting import OtherVersion, receive_greeting
from .heartbeat import TICK_S, HeartbeatMonitor


class ProcessHost:
    """Runs the engine in its own process, over a stream socket pair whose end of file means that it has died.

    An engine that hangs after it was ready is killed. While it is loading, silence is expected.
    """

    STOP_GRACE_S = 2.0
    MODULE = "quipu.actors.processes.engine_process"
    """Module that the process runs. A benchmark replaces it by one that measures it."""

    def __init__(self, config: EngineConfig, environment: dict[str, str], *, step_timeout_s: float = 0.0) -> None:
        """`step_timeout_s`: how long a step may take before the engine counts as hung; 0 means no limit."""
        self._config = config
        self._environment = environment
        self._step_timeout_s = step_timeout_s
        self.process: trio.Process | None = None

    async def run(self, link: EngineLink) -> Death:
        with ExitStack() as opened:
            try:
                memory = StepRecord.open_memory(self._config.max_num_seqs)
                opened.callback(os.close, memory)
                record = StepRecord(memory)
                opened.callback(record.close)
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:
                return _start_failure(error)
            death = await self._run(link, ours, theirs, memory)
            return attrs.evolve(death, step_ids=record.read())

    async def _run(self, link: EngineLink, ours: socket.socket, theirs: socket.socket, memory: int) -> Death:
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        async with stream:
            with theirs:
                try:
                    process = await self._start(theirs.fileno(), memory, link.incarnation)
                except (OSError, MemoryError) as error:
                    return _start_failure(error)
            self.process = process
            try:
                fault = await self._relay(link, stream, process)
                link.lost(fault or "its connection was closed")
                with trio.move_on_after(self.STOP_GRACE_S) as grace:
                    await process.wait()
                if grace.cancelled_caught:
                    fault = fault or "it closed its connection and did not end"
            finally:
                self.process = None
                await self._stop(process, stream)
        if link.refusal is not None:
            return Death(link.refusal, hopeless=True)
        if fault is not None:
            return Death(fault)
        if process.returncode == -signal.SIGBUS:
            return await trio.to_thread.run_sync(_explain_bus_error, Path(self._config.model_path))
        return _explain(process.returncode)

    async def _start(self, descriptor: int, memory: int, incarnation: int) -> trio.Process:
        config = msgspec.json.encode(self._config).decode()
        return await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", self.MODULE, str(descriptor), str(memory), str(incarnation), config],
            pass_fds=(descriptor, memory),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            process_group=OWN_GROUP,
        )

    async def _relay(self, link: EngineLink, stream: trio.SocketStream, process: trio.Process) -> str | None:
        """Relay messages both ways until the engine closes its end. Returns why it was killed, if it was.

        The last messages of a killed engine are still read, because what it had done counts.
        """
        reader = FrameReader(stream, link.incarnation)
        writer = FrameWriter(stream, link.incarnation)
        monitor = HeartbeatMonitor(self._step_timeout_s)
        is_reading = False
        fault: str | None = None

        async def write() -> None:
            try:
                while True:
                    await writer.send_all(await link.take())
            except PeerGone:
                pass  # the reader notices it too, after the last report

        async def watch() -> None:
            last = trio.current_time()
            hung = None
            while hung is None:
                await trio.sleep(TICK_S)
                now = trio.current_time()
                could_receive = is_reading and link.is_ready
                num_written = writer.num_written if writer.is_writing else None
                hung = monitor.advance(now - last, could_receive=could_receive, num_written=num_written)
                last = now
            end(hung)

        def end(reason: str) -> None:
            nonlocal fault
            fault = fault or reason
            link.lost(fault)
            kill_group(process.pid)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(watch)
            try:
                await receive_greeting(stream)
                while True:
                    is_reading = True
                    messages = await reader.receive_all()
                    is_reading = False
                    monitor.on_message()
                    for message in messages:
                        if isinstance(message, Heartbeat):
                            monitor.on_heartbeat(message)
                    await link.deliver(messages)
            except Unreadable as error:
                end(f"it sent what cannot be read: {error}")
            except OtherVersion as error:
                link.refusal = str(error)
                end(link.refusal)
            except PeerGone:
                pass
            nursery.cancel_scope.cancel()
        return fault

    async def _stop(self, process: trio.Process, stream: trio.SocketStream) -> None:
        """Ask the engine to end by closing its socket, wait for a while, then kill it."""
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
        return Death("there was not enough memory, or not enough file descriptors, to load it", is_shortage=True)
    return Death(f"its process ended with exit code {returncode}")


def _explain_bus_error(checkpoint: Path) -> Death:
    """Return why reading mapped memory failed. Final if it would fail again."""
    cut_off = find_cut_off(checkpoint)
    if cut_off is not None:
        return Death(f"killed by SIGBUS: a checkpoint file changed while it was in use: {cut_off}", is_final=True)
    causes = "a file changed while it was in use, or the disk or /dev/shm is full or broken"
    return Death(f"killed by SIGBUS: mapped memory could not be read ({causes})")


def _start_failure(error: OSError | MemoryError) -> Death:
    return Death(f"the engine cannot be started: {error or type(error).__name__}", is_shortage=True)
