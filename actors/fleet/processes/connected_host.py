"""Hosts an engine in a process, wherever that runs: relays its messages, and finds out how it ended.

Run by the supervisor, once per incarnation. An engine is killed if its step takes too long (`heartbeat.py`), if it
sends what cannot be read, or is of another version. One that is silent for too long, or closes its connection and does
not end, may still connect again: `run` returns and leaves the process to the next incarnation (`engine_child.py`),
which waits for it for a while before it kills it and starts another. `process_host.py` starts processes on this
machine, `remote_host.py` on others.

What must always hold: when `run` returns, the connection is lost for good, and all messages before that have been
delivered, up to the first that cannot be read; `run` does not raise because of what an engine sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import attrs
import trio

from ...messages.supervisor import Heartbeat
from ...threads import is_out_of_memory
from ..agreement import Mismatch
from ..frames import FrameReader, FrameWriter, PeerGone, Unreadable, WireMessage
from ..supervisor import Death, EngineLink
from .engine_child import EngineChild
from .greeting import OtherVersion, receive_greeting
from .heartbeat import HEARTBEAT_INTERVAL_S, TICK_S, HeartbeatMonitor
from .reconnection import REJOIN_S

CLOSED = "its connection was closed"
OUT_OF_MEMORY = "the server had no memory for its messages"


class NotStarted(Exception):
    """An engine process could not be started, or ended before it was connected."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.reason)
        self.death = death


@attrs.frozen
class Loss:
    """Why a connection is over."""

    fault: str | None = None
    """What is wrong with the engine; None if it has closed its end."""
    may_return: bool = False
    """Only the connection may be at fault."""


class ConnectedHost(ABC):
    """Runs an engine that is connected by a stream. While it is loading, silence is expected."""

    STOP_GRACE_S = 2.0

    def __init__(
        self, *, step_timeout_s: float = 0.0, rejoin_s: float = REJOIN_S, beat_s: float = HEARTBEAT_INTERVAL_S
    ) -> None:
        """`step_timeout_s`: how long a step may take before the engine counts as hung; 0 means no limit.

        `rejoin_s`: how long a process whose connection is lost may take to connect again or to end.
        """
        self._step_timeout_s = step_timeout_s
        self._rejoin_s = rejoin_s
        self._beat_s = beat_s
        self.child: EngineChild | None = None

    async def run(self, link: EngineLink) -> Death:
        """Run the process that the last incarnation has left, if it connects again in time; otherwise start one."""
        try:
            async with trio.open_nursery() as nursery:
                death = await self._run(link, nursery)
                nursery.cancel_scope.cancel()
        except BaseException as error:
            await self.close()
            if not is_out_of_memory(error):
                raise
            link.lost(OUT_OF_MEMORY)
            return Death(OUT_OF_MEMORY)
        return death

    async def _run(self, link: EngineLink, nursery: trio.Nursery) -> Death:
        stream = None
        if self.child is not None:
            nursery.start_soon(self.child.refuse_old_frames, link)
            stream = await self.child.readmit(link.incarnation, self._rejoin_s)
        is_new = stream is None
        if stream is None:
            await self._end(0.0)  # it had its time
            try:
                self.child, stream = await self._start_child(link.incarnation)
            except (OSError, MemoryError) as error:
                reason = f"the engine cannot be started: {error or type(error).__name__}"
                return Death(reason, is_shortage=True)
            except NotStarted as error:
                return error.death
        child = self.child
        assert child is not None
        reader = FrameReader(stream, link.incarnation, link.refuse)
        loss = await self._relay(link, child, stream, reader, is_new=is_new)
        link.lost(loss.fault or CLOSED)
        is_at_end = loss.fault is None
        if is_at_end:
            loss = await self._wait_after_end_of_file(link, child)
        if loss.may_return and not child.process.has_ended:
            await child.lose(reader, is_at_end=is_at_end)
        else:
            await self.close()
        if link.refusal is not None:
            death = Death(link.refusal, hopeless=True)
        elif loss.fault is not None:
            death = Death(loss.fault)
        else:
            death = await child.process.explain()
        return attrs.evolve(death, step_ids=child.step_ids)

    async def close(self) -> None:
        """End the process, if there is one."""
        await self._end(self.STOP_GRACE_S)

    async def _end(self, grace_s: float) -> None:
        child, self.child = self.child, None
        if child is not None:
            await child.end(grace_s)

    async def _wait_after_end_of_file(self, link: EngineLink, child: EngineChild) -> Loss:
        """Wait until a process that has closed its connection ends or connects again."""
        may_return = link.is_ready and link.refusal is None
        has_called = await child.wait_for_caller_or_end(self.STOP_GRACE_S, may_call=may_return)
        if child.process.has_ended:
            return Loss()
        if has_called or (may_return and self._rejoin_s > self.STOP_GRACE_S):
            return Loss(CLOSED, may_return=True)
        child.process.kill()
        return Loss("it closed its connection and did not end")

    @abstractmethod
    async def _start_child(self, incarnation: int) -> tuple[EngineChild, trio.SocketStream]:
        """Start an engine process, and connect to it. Raises OSError, MemoryError and NotStarted."""

    async def _relay(
        self, link: EngineLink, child: EngineChild, stream: trio.SocketStream, reader: FrameReader, *, is_new: bool
    ) -> Loss:
        """Relay messages both ways until the connection is over. `is_new`: the engine has not been loaded yet."""
        writer = FrameWriter(stream, link.incarnation)
        monitor = HeartbeatMonitor(self._step_timeout_s, self._beat_s)
        is_reading = False
        loss = Loss()

        async def write() -> None:
            try:
                while True:
                    messages: Sequence[WireMessage] = [Heartbeat(0, 0.0)]
                    with trio.move_on_after(self._beat_s):
                        messages = await link.take()
                    await writer.send_all(messages)
            except PeerGone:
                pass  # the reader notices it too, after the last report

        async def watch() -> None:
            last = trio.current_time()
            verdict = None
            while verdict is None:
                await trio.sleep(TICK_S)
                now = trio.current_time()
                could_receive = is_reading and (link.is_ready or not is_new)
                num_written = writer.num_written if writer.is_writing else None
                verdict = monitor.advance(now - last, could_receive=could_receive, num_written=num_written)
                last = now
            end(verdict.reason, is_lost=verdict.is_lost)

        def end(reason: str, *, is_lost: bool = False) -> None:
            nonlocal loss
            if loss.fault is None:
                loss = Loss(reason, may_return=is_lost)
            link.lost(reason)
            if is_lost:
                nursery.cancel_scope.cancel()
            else:
                child.process.kill()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(watch)
            try:
                if is_new and not child.is_greeted:
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
            except (OtherVersion, Mismatch) as error:
                link.refusal = str(error)
                end(link.refusal)
            except PeerGone:
                pass
            nursery.cancel_scope.cancel()
        return loss
