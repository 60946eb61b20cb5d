"""The supervisors: each keeps one engine running, and tracks its health.

An engine (scheduler, KV-block manager and executor, restarted as one group) runs in a host: in this loop (`engine.py`)
or in its own process (`processes/process_host.py`). When it dies, health is updated first, and the router is told; then
`EngineDied`, after the last of its reports, has the accountant take back all sequences that it held, which are resumed
or ended, and a new incarnation is started. A lost connection is a death, too; if the engine goes on, it comes back as
the next incarnation, and what the old one still sends is only counted.

What must always hold: health is never reported better than it is; two engines never hold the same sequence; an engine
that dies too often within the window is given up, and the server ends with an error when no other serves. Deaths do not
count after the engine has done some work, nor while the server searches for the request that causes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import msgspec
import structlog
import trio

from ..channel import Channel, EagerSender, Poster
from ..config.runtime_config import RuntimeConfig
from ..messages.accountant import EngineDied, StepReport
from ..messages.engine_adapters import AdapterLoaded, AdapterMessage
from ..messages.handler import LookedUp
from ..messages.router import EngineDown, EngineUp
from ..messages.supervisor import EngineReady, EngineRefused, Heartbeat
from ..request_desk.adapters import AdapterRefused
from ..request_desk.desk import RequestDesk
from ..request_desk.engine_pool import EngineMessage, PooledEngine
from ..request_desk.health import Health, State
from ..request_desk.interface import describe_pool
from ..router.route_store import RouterMessage
from .agreement import Mismatch, check_numerics
from .frames import Unreadable

log = structlog.get_logger()

MAX_BACKOFF_S = 5.0
"""Longest wait between two attempts to start an engine when memory or file descriptors are short."""
MAX_DOUBLINGS = 16
"""How often that wait is doubled: enough to reach `MAX_BACKOFF_S` from any initial value."""


class EngineGivenUp(Exception):
    """The engine died too often. The server must end with an error."""


class EngineRefusal(EngineGivenUp):
    """No engine can serve with this configuration, or with the files as they are now; the message says why."""


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


@attrs.define(eq=False)
class EngineLink:
    """The connection of one incarnation of an engine to the web side."""

    _engine: PooledEngine
    incarnation: int
    _desk: RequestDesk
    _accountant: EagerSender[StepReport]
    _router: Poster[RouterMessage]
    _show_ready: Callable[[PooledEngine], object]
    _must_agree: bool = False
    """Refuse an engine whose results would differ from the others'."""
    _connected: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set once the engine can be told what it needs before it is ready."""
    _before_ready: list[AdapterMessage] = attrs.field(factory=list, init=False)
    _loaded: EngineReady | None = attrs.field(default=None, init=False)
    """What the engine has said, while its adapters are still to be restored."""
    _ready: trio.Event = attrs.field(factory=trio.Event, init=False)
    refusal: str | None = attrs.field(default=None, init=False)
    has_progressed: bool = attrs.field(default=False, init=False)

    @property
    def engine_id(self) -> int:
        return self._engine.engine_id

    async def take(self) -> list[EngineMessage]:
        """Return the next messages for the engine. Waits until it is ready and there are any.

        Until it is ready the engine holds nothing, so waiting messages survive an engine that dies while it loads.
        """
        await self._connected.wait()
        if self._before_ready:
            messages, self._before_ready = self._before_ready, []
            return list(messages)
        await self._ready.wait()
        return await self._desk.sequences.take_for(self._engine, self.incarnation)

    async def deliver(self, messages: Iterable[object]) -> None:
        """Handle messages from the engine, in order. Raises Unreadable at one that no engine sends, and Mismatch."""
        is_first = True  # of several reports only one is booked before others run
        for message in messages:
            match message:
                case StepReport():
                    await self._report(message, may_deliver_now=is_first)
                    is_first = False
                case LookedUp():
                    self._desk.sequences.lookups.answer(message, self.engine_id)
                case EngineReady():
                    self._on_loaded(message)
                case AdapterLoaded():
                    self._on_adapter(message)
                case EngineRefused(reason):
                    self.refusal = reason
                case Heartbeat():
                    pass  # the host's
                case _:
                    raise Unreadable(f"{type(message).__name__}, which only engines receive")

    async def _report(self, message: StepReport, *, may_deliver_now: bool) -> None:
        engine = self._engine
        report = msgspec.structs.replace(message, engine_id=engine.engine_id, incarnation=self.incarnation)
        self.has_progressed |= bool(report.span_ids)
        engine.note(report)
        if report.admitted_ids:
            self._desk.sequences.note_admitted(report.admitted_ids, self.incarnation)
        self._router.post(report)
        if may_deliver_now and self._accountant.deliver_now(report):
            return
        if not self._accountant.send_nowait(report):
            await self._accountant.send(report)

    def _on_loaded(self, ready: EngineReady) -> None:
        """Let the engine serve once it has the adapters that are served."""
        if self._must_agree:
            check_numerics(self._desk.pool, self._engine, ready)
        self._before_ready = self._desk.adapters.restore(self._engine)
        self._loaded = ready
        self._connected.set()
        self._serve_if_restored()

    def _on_adapter(self, message: AdapterLoaded) -> None:
        try:
            self._desk.adapters.answer(self._engine, message)
        except AdapterRefused as error:
            raise Mismatch(str(error)) from None
        self._serve_if_restored()

    def _serve_if_restored(self) -> None:
        if self._loaded is not None and self._desk.adapters.is_restored(self._engine):
            ready, self._loaded = self._loaded, None
            self._on_ready(ready)

    def _on_ready(self, ready: EngineReady) -> None:
        engine, desk = self._engine, self._desk
        engine.ready = ready
        engine.health = Health(State.READY, self.incarnation, "")
        engine.note_gone()
        log.info("engine.ready", engine_id=engine.engine_id, **attrs.asdict(ready), **describe_pool(ready))
        lengths = [its.max_model_len for other in desk.pool if (its := other.ready) is not None and its.max_model_len]
        longest = min(lengths, default=desk.info.max_model_len)
        desk.info = attrs.evolve(desk.info, num_blocks=ready.num_blocks, max_model_len=longest, engine=ready)
        self._show_ready(engine)
        self._router.post(
            EngineUp(
                engine.engine_id,
                self.incarnation,
                engine.num_blocks,
                ready.numerics,
                engine.role,
                ready.peer_address,
            )
        )
        self._ready.set()

    @property
    def is_ready(self) -> bool:
        """Whether the engine has loaded."""
        return self._ready.is_set()

    def refuse(self, num_frames: int) -> None:
        """Count frames that came from an older incarnation. Nothing else becomes of them."""
        self._desk.pool.on_stale_frames(num_frames, self._engine.engine_id)

    def lost(self, reason: str) -> None:
        """Note that the engine cannot be reached any more. How it ended is determined next."""
        self._engine.health = Health(State.RESTARTING, self.incarnation, reason)
        self._router.post(EngineDown(self._engine.engine_id, self.incarnation))


class EngineHost(Protocol):
    async def run(self, link: EngineLink) -> Death:
        """Run one incarnation of an engine until it dies, and say why. The engine may come back as the next one."""

    async def close(self) -> None:
        """End what the last incarnation has left."""


@attrs.define(eq=False)
class Supervisor:
    """Keeps one engine running."""

    _config: RuntimeConfig
    _engine: PooledEngine
    _host: EngineHost
    _desk: RequestDesk
    _accountant: Channel[StepReport | EngineDied]
    _router: Poster[RouterMessage]
    _show_ready: Callable[[PooledEngine], object]
    _may_fail_alone: bool = attrs.field(kw_only=True)
    """Whether the server goes on if this engine can never serve, as long as others do."""
    _incarnation: int = attrs.field(init=False)

    @_incarnation.default
    def _take_incarnation(self) -> int:
        return self._desk.pool.next_incarnation()  # now, so that engines are numbered in order

    async def run(self) -> None:
        """Keep an engine running until cancelled, or until it is given up while others serve. Raises EngineGivenUp."""
        try:
            await self._run()
        finally:
            with trio.CancelScope(shield=True):
                await self._host.close()

    async def _run(self) -> None:
        config, desk, engine = self._config, self._desk, self._engine
        deaths: deque[float] = deque()
        num_shortages = 0
        was_ready = False
        while True:
            incarnation = self._incarnation
            in_cluster = config.cluster is not None
            link = EngineLink(
                engine, incarnation, desk, self._accountant, self._router, self._show_ready, must_agree=in_cluster
            )
            death = await self._host.run(link)
            self._incarnation = desk.pool.next_incarnation()
            was_ready |= link.is_ready
            if death.is_shortage and (was_ready or self._may_fail_alone):
                self._note_shortage(incarnation, death)
                await trio.sleep(min(config.restart_backoff_s * 2**num_shortages, MAX_BACKOFF_S))
                num_shortages = min(num_shortages + 1, MAX_DOUBLINGS)
                continue
            num_shortages = 0
            now = trio.current_time()
            # an engine that did some work, or was to find out which request is the cause, says nothing about the next
            if not link.has_progressed and not (link.is_ready and desk.sequences.is_searching):
                deaths.append(now)
            while deaths and deaths[0] < now - config.restart_window_s:
                deaths.popleft()
            is_refused = death.is_final or (death.hopeless and not was_ready)
            giving_up = is_refused or len(deaths) > config.max_restarts
            self._note_death(incarnation, death, giving_up=giving_up)
            if giving_up:
                if desk.pool.serves_without(engine.engine_id) and (was_ready or self._may_fail_alone):
                    return
                raise (EngineRefusal if is_refused else EngineGivenUp)(death.reason)
            await trio.sleep(config.restart_backoff_s * 2 ** max(0, len(deaths) - 1))
            await desk.sequences.until_taken_back(incarnation)

    def _note_death(self, incarnation: int, death: Death, *, giving_up: bool) -> None:
        """Have the accountant take back what a dead engine held."""
        engine, sequences = self._engine, self._desk.sequences
        held = sequences.held_by(incarnation)
        sequences.lookups.on_engine_gone(engine.engine_id)
        self._desk.adapters.on_engine_gone(engine)
        engine.num_deaths += 1
        engine.note_gone()
        engine.repeat_reset()
        engine.health = Health(State.FAILED if giving_up else State.RESTARTING, incarnation, death.reason)
        self._router.post(EngineDown(engine.engine_id, incarnation))
        engine_id, reason = engine.engine_id, death.reason
        log.error("engine.died", engine_id=engine_id, incarnation=incarnation, reason=reason, num_held=len(held))
        is_last = giving_up and not self._desk.pool.serves_without(engine_id)
        died = EngineDied(incarnation, reason, held, death.step_ids, is_last=is_last, engine_id=engine_id)
        self._accountant.post(died)

    def _note_shortage(self, incarnation: int, death: Death) -> None:
        """Note that a restart has to wait. This engine held nothing, so it does not count as a death."""
        self._engine.health = Health(State.RESTARTING, incarnation, death.reason)
        log.error("engine.not_started", incarnation=incarnation, reason=death.reason)
