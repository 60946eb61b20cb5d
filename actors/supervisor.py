"""The supervisor: runs one engine after another, and tracks their health.

An engine (scheduler, KV-block manager and executor, restarted as one group) runs in a host: in this loop (`engine.py`)
or in its own process (`processes/process_host.py`). When it dies, health is updated first; then `EngineDied`, after the
last of its reports, has the accountant take back all sequences that it held, which are resumed or ended, and a new
incarnation is started. Messages waiting in the lane go to the new one.

What must always hold: health is never reported better than it is; two engines never hold the same sequence; too many
deaths within the window end the server with an error. Deaths of engines that have done some work do not count, nor do
those by which the one request is found that causes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import attrs
import structlog
import trio

from .channel import Channel
from .config import RuntimeConfig
from .frames import Unreadable
from .messages.accountant import EngineDied, StepReport
from .messages.supervisor import EngineReady, EngineRefused, Heartbeat
from .request_desk.desk import RequestDesk
from .request_desk.engine_lane import EngineMessage
from .request_desk.interface import Health, State, describe_pool

log = structlog.get_logger()

MAX_BACKOFF_S = 5.0
"""Longest wait between two attempts to start an engine when memory or file descriptors are short."""
MAX_DOUBLINGS = 16
"""How often that wait is doubled: enough to reach `MAX_BACKOFF_S` from any initial value."""


class EngineGivenUp(Exception):
    """The engine died too often. The server must end with an error."""


class EngineRefusal(EngineGivenUp):
    """No engine can serve as configured, or with its files as they are now; the message says why. Another start would
    end the same way."""


@attrs.frozen
class Death:
    reason: str
    hopeless: bool = False
    """Another start would end the same way."""
    is_shortage: bool = False
    """There was not enough memory, or not enough file descriptors, to start it; there may be later."""
    is_final: bool = False
    """Like `hopeless`, even if engines have served before."""
    step_ids: tuple[int, ...] | None = None
    """The sequences of the step that it was running, if that is known."""


class EngineLink:
    """The connection of one incarnation to the web side."""

    def __init__(self, incarnation: int, desk: RequestDesk, accountant: Channel[StepReport | EngineDied]) -> None:
        self.incarnation = incarnation
        self._desk = desk
        self._accountant = accountant
        self._ready = trio.Event()
        self.refusal: str | None = None
        """Why the engine cannot serve, if it has refused."""
        self.has_progressed = False
        """Whether the engine has done any work."""

    async def take(self) -> list[EngineMessage]:
        """Return the next messages for the engine. Waits until it is ready and there are any.

        Until it is ready the engine holds nothing, so waiting messages survive an engine that dies while it loads.
        """
        await self._ready.wait()
        return await self._desk.lane.take_for(self.incarnation)

    async def deliver(self, messages: Iterable[object]) -> None:
        """Handle messages from the engine, in order. Raises Unreadable at one that no engine sends."""
        for message in messages:
            match message:
                case StepReport():
                    self.has_progressed |= bool(message.span_ids)
                    await self._accountant.send(message)
                case EngineReady():
                    log.info("engine.ready", **attrs.asdict(message), **describe_pool(message))
                    self._desk.introduce(message)
                    self._desk.set_health(Health(State.READY, self.incarnation, ""))
                    self._ready.set()
                case EngineRefused(reason):
                    self.refusal = reason
                case Heartbeat():
                    pass  # the host's
                case _:
                    raise Unreadable(f"{type(message).__name__}, which only engines receive")

    @property
    def is_ready(self) -> bool:
        """Whether the engine has loaded."""
        return self._ready.is_set()

    def lost(self, reason: str) -> None:
        """Note that the engine cannot be reached any more. How it ended is determined next."""
        self._desk.set_health(Health(State.RESTARTING, self.incarnation, reason))


class EngineHost(Protocol):
    async def run(self, link: EngineLink) -> Death:
        """Run one engine until it dies, and say why."""
        ...


class Supervisor:
    def __init__(
        self,
        config: RuntimeConfig,
        host: EngineHost,
        desk: RequestDesk,
        accountant: Channel[StepReport | EngineDied],
    ) -> None:
        self._config = config
        self._host = host
        self._desk = desk
        self._accountant = accountant

    async def run(self) -> None:
        """Keep an engine running until cancelled. Raises EngineGivenUp."""
        config, desk = self._config, self._desk
        deaths: deque[float] = deque()
        num_shortages = 0
        was_ready = False
        incarnation = 0
        while True:
            incarnation += 1
            link = EngineLink(incarnation, desk, self._accountant)
            death = await self._host.run(link)
            was_ready |= link.is_ready
            if death.is_shortage and was_ready:
                self._note_shortage(incarnation, death)
                await trio.sleep(min(config.restart_backoff_s * 2**num_shortages, MAX_BACKOFF_S))
                num_shortages = min(num_shortages + 1, MAX_DOUBLINGS)
                continue
            num_shortages = 0
            now = trio.current_time()
            # an engine that did some work, or was to find out which request is the cause, says nothing about the next
            if not link.has_progressed and not (link.is_ready and desk.lane.is_searching):
                deaths.append(now)
            while deaths and deaths[0] < now - config.restart_window_s:
                deaths.popleft()
            is_refused = death.is_final or (death.hopeless and not was_ready)
            giving_up = is_refused or len(deaths) > config.max_restarts
            state = State.FAILED if giving_up else State.RESTARTING
            held = desk.lane.held_by(incarnation)
            desk.set_health(Health(state, incarnation, death.reason))
            log.error("engine.died", incarnation=incarnation, reason=death.reason, num_held=len(held))
            self._accountant.post(EngineDied(incarnation, death.reason, held, death.step_ids, is_last=giving_up))
            if giving_up:
                raise (EngineRefusal if is_refused else EngineGivenUp)(death.reason)
            await trio.sleep(config.restart_backoff_s * 2 ** max(0, len(deaths) - 1))
            await desk.lane.until_taken_back(incarnation)

    def _note_shortage(self, incarnation: int, death: Death) -> None:
        """Note that a restart has to wait. This engine held nothing, so it does not count as a death."""
        self._desk.set_health(Health(State.RESTARTING, incarnation, death.reason))
        log.error("engine.not_started", incarnation=incarnation, reason=death.reason)
