"""The supervisor: runs one engine after another, and knows how they are.

An engine (scheduler, KV-block manager, executor: one restart group) runs in a host: in this loop, or in a process of
its own. When it dies, everything it held is told so (`EngineDied`, after the last of its reports), health says so
before that, and a new incarnation begins. What waits in the lane goes to the new one. One that hangs is killed
(`core/pulse.py` judges): it says nothing any more, or one step takes too long.

What must always hold: health is never better than the truth; two engines never hold the same sequence; too many deaths
within the window end the server with an error.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import attrs
import msgspec
import structlog
import trio

from quipu.actors.channel import Channel, FrameReader, FrameWriter, PeerGone
from quipu.actors.child import OWN_GROUP, kill_group
from quipu.actors.config import EngineConfig, HouseConfig
from quipu.actors.core.pulse import TICK_S, Pulse
from quipu.actors.front import Health, State, describe_pool
from quipu.actors.messages import Alive, EngineDied, EngineReady, EngineRefused, StepReport
from quipu.actors.registry import EngineMessage, Registry

log = structlog.get_logger()

MAX_BACKOFF_S = 5.0
"""Between two tries to start an engine where there is no memory, or are no descriptors."""
MAX_DOUBLINGS = 16
"""Of the time between them: enough to come from any first one to that."""


class EngineGivenUp(Exception):
    """The engine died too often. The server must end with an error."""


class EngineRefusal(EngineGivenUp):
    """The first engine cannot serve as it is configured, and has said why. Another start would end the same way."""


@attrs.frozen
class Death:
    reason: str
    hopeless: bool = False
    """Another start would end the same way."""
    is_shortage: bool = False
    """There was no memory, or were no descriptors, to start it with: there may be some later."""


class EngineLink:
    """One incarnation's way to the web side."""

    def __init__(self, incarnation: int, registry: Registry, accountant: Channel[StepReport | EngineDied]) -> None:
        self.incarnation = incarnation
        self._registry = registry
        self._accountant = accountant
        self._ready = trio.Event()
        self.refusal: str | None = None
        """Why the engine cannot serve, if it has said so."""

    async def take(self) -> list[EngineMessage]:
        """What the engine gets next; waits until it is ready and there is something.

        Until it is ready it holds nothing: what waits survives an engine that dies while it loads.
        """
        await self._ready.wait()
        return await self._registry.take_for(self.incarnation)

    async def deliver(self, messages: Iterable[object]) -> None:
        """What the engine says, in order."""
        for message in messages:
            match message:
                case StepReport():
                    await self._accountant.send(message)
                case EngineReady():
                    log.info("engine.ready", **attrs.asdict(message), **describe_pool(message))
                    self._registry.introduce(message)
                    self._registry.set_health(Health(State.READY, self.incarnation, ""))
                    self._ready.set()
                case EngineRefused(reason):
                    self.refusal = reason

    @property
    def is_ready(self) -> bool:
        """The engine has loaded."""
        return self._ready.is_set()

    def lost(self, reason: str) -> None:
        """The engine cannot be reached any more; what became of it is found out next."""
        self._registry.set_health(Health(State.RESTARTING, self.incarnation, reason))


class EngineHost(Protocol):
    async def run(self, link: EngineLink) -> Death:
        """Run one engine until it dies, and say why."""
        ...


class Supervisor:
    def __init__(
        self,
        config: HouseConfig,
        host: EngineHost,
        registry: Registry,
        accountant: Channel[StepReport | EngineDied],
    ) -> None:
        self._config = config
        self._host = host
        self._registry = registry
        self._accountant = accountant

    async def run(self) -> None:
        """Keep an engine running until cancelled. Raises EngineGivenUp."""
        config, registry = self._config, self._registry
        deaths: deque[float] = deque()
        num_shortages = 0
        was_ready = False
        incarnation = 0
        while True:
            incarnation += 1
            link = EngineLink(incarnation, registry, self._accountant)
            death = await self._host.run(link)
            was_ready |= link.is_ready
            if death.is_shortage and was_ready:
                self._note_shortage(incarnation, death)
                await trio.sleep(min(config.restart_backoff_s * 2**num_shortages, MAX_BACKOFF_S))
                num_shortages = min(num_shortages + 1, MAX_DOUBLINGS)
                continue
            num_shortages = 0
            now = trio.current_time()
            deaths.append(now)
            while deaths[0] < now - config.restart_window_s:
                deaths.popleft()
            is_refused = death.hopeless and not was_ready
            giving_up = is_refused or len(deaths) > config.max_restarts
            state = State.FAILED if giving_up else State.RESTARTING
            held = registry.held_by(incarnation)
            registry.set_health(Health(state, incarnation, death.reason))
            log.error("engine.died", incarnation=incarnation, reason=death.reason, num_held=len(held))
            self._accountant.post(EngineDied(incarnation, death.reason, held))
            if giving_up:
                raise (EngineRefusal if is_refused else EngineGivenUp)(death.reason)
            await trio.sleep(config.restart_backoff_s * 2 ** (len(deaths) - 1))

    def _note_shortage(self, incarnation: int, death: Death) -> None:
        """A restart has to wait: it held nothing, and is no death of an engine that worked."""
        self._registry.set_health(Health(State.RESTARTING, incarnation, death.reason))
        log.error("engine.not_started", incarnation=incarnation, reason=death.reason)


class ProcessHost:
    """Runs the engine in a process of its own, over a stream socket pair whose end of file is its death.

    An engine that hangs once it is ready is killed. While it loads, its silence says nothing.
    """

    STOP_GRACE_S = 2.0
    MODULE = "quipu.actors.engine_process"
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
