"""The supervisor: runs one engine after another, and knows how they are.

An engine (scheduler, KV-block manager, executor: one restart group) runs in a host: in this loop (`engine.py`), or in a
process of its own (`processes/process_host.py`). When it dies, everything it held is told so (`EngineDied`, after the
last of its reports), health says so before that, and a new incarnation begins. What waits in the lane goes to the new
one.

What must always hold: health is never better than the truth; two engines never hold the same sequence; too many deaths
within the window end the server with an error.
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
from .messages.accountant import EngineDied, StepReport
from .messages.supervisor import EngineReady, EngineRefused
from .request_desk.desk import RequestDesk
from .request_desk.engine_lane import EngineMessage
from .request_desk.interface import Health, State, describe_pool

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

    def __init__(self, incarnation: int, desk: RequestDesk, accountant: Channel[StepReport | EngineDied]) -> None:
        self.incarnation = incarnation
        self._desk = desk
        self._accountant = accountant
        self._ready = trio.Event()
        self.refusal: str | None = None
        """Why the engine cannot serve, if it has said so."""

    async def take(self) -> list[EngineMessage]:
        """What the engine gets next; waits until it is ready and there is something.

        Until it is ready it holds nothing: what waits survives an engine that dies while it loads.
        """
        await self._ready.wait()
        return await self._desk.lane.take_for(self.incarnation)

    async def deliver(self, messages: Iterable[object]) -> None:
        """What the engine says, in order."""
        for message in messages:
            match message:
                case StepReport():
                    await self._accountant.send(message)
                case EngineReady():
                    log.info("engine.ready", **attrs.asdict(message), **describe_pool(message))
                    self._desk.introduce(message)
                    self._desk.set_health(Health(State.READY, self.incarnation, ""))
                    self._ready.set()
                case EngineRefused(reason):
                    self.refusal = reason

    @property
    def is_ready(self) -> bool:
        """The engine has loaded."""
        return self._ready.is_set()

    def lost(self, reason: str) -> None:
        """The engine cannot be reached any more; what became of it is found out next."""
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
            deaths.append(now)
            while deaths[0] < now - config.restart_window_s:
                deaths.popleft()
            is_refused = death.hopeless and not was_ready
            giving_up = is_refused or len(deaths) > config.max_restarts
            state = State.FAILED if giving_up else State.RESTARTING
            held = desk.lane.held_by(incarnation)
            desk.set_health(Health(state, incarnation, death.reason))
            log.error("engine.died", incarnation=incarnation, reason=death.reason, num_held=len(held))
            self._accountant.post(EngineDied(incarnation, death.reason, held))
            if giving_up:
                raise (EngineRefusal if is_refused else EngineGivenUp)(death.reason)
            await trio.sleep(config.restart_backoff_s * 2 ** (len(deaths) - 1))

    def _note_shortage(self, incarnation: int, death: Death) -> None:
        """A restart has to wait: it held nothing, and is no death of an engine that worked."""
        self._desk.set_health(Health(State.RESTARTING, incarnation, death.reason))
        log.error("engine.not_started", incarnation=incarnation, reason=death.reason)
