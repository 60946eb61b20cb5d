"""Starts the server's engines, further ones on demand, and ends those that are to go.

Run from `wiring`. Each engine has a supervisor in a task of its own.

What must always hold: an engine ends only once it holds nothing, unless the server itself ends; no engine is ended
while it is the only one that serves, unless that is forced.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import structlog
import trio

from ..channel import Channel, Poster
from ..config.engine_roles import EngineRole, RolesRefused
from ..config.runtime_config import MAX_ENGINES, RuntimeConfig
from ..messages.accountant import EngineDied, StepReport
from ..messages.router import EngineClosing, EngineDown, RoleChanged
from ..request_desk.desk import RequestDesk
from ..request_desk.engine_pool import PooledEngine
from ..request_desk.health import CannotMove, DrainMode, LastEngine
from ..request_desk.moving import move_some, targets_of
from ..router.route_store import RouterMessage
from .supervisor import EngineHost, Supervisor

log = structlog.get_logger()

MakeHost = Callable[[int], EngineHost]

MOVE_LIMIT_S = 30.0
"""How long an engine that is to end waits for others to fetch the blocks of its sequences."""


@attrs.define(eq=False)
class _Drain:
    """What is still done for the sequences of an engine that is to end."""

    patience: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Around the wait for those that it ends itself."""
    moving: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Around the wait for those whose blocks others fetch."""
    moves: bool = False
    """Whether what is handed over may be fetched."""


@attrs.define(eq=False)
class EngineManager:
    """Implements `request_desk.interface.EngineControl`."""

    _config: RuntimeConfig
    _make_host: MakeHost
    _desk: RequestDesk
    _accountant: Channel[StepReport | EngineDied]
    _router: Poster[RouterMessage]
    _show_ready: Callable[[PooledEngine], object] = attrs.field(kw_only=True)
    _show_removed: Callable[[int], object] = attrs.field(kw_only=True)
    _tasks: trio.Nursery = attrs.field(init=False)
    _scopes: dict[int, trio.CancelScope] = attrs.field(factory=dict, init=False)
    """Of each engine's supervisor."""
    _drains: dict[int, _Drain] = attrs.field(factory=dict, init=False)
    """Of each closing engine."""
    hosts: dict[int, EngineHost] = attrs.field(factory=dict, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engines until cancelled. Raises EngineGivenUp when none is left that could serve."""
        async with trio.open_nursery() as self._tasks:
            for index in range(self._config.num_engines):
                self._start(self._config.role_of(index), may_fail_alone=False)
            task_status.started()
            await trio.sleep_forever()

    def add(self, count: int, role: EngineRole = EngineRole.MIXED) -> tuple[int, ...]:
        self._check_role(role)
        if len(self._desk.pool) + count > MAX_ENGINES:
            raise ValueError(f"there may be at most {MAX_ENGINES} engines")
        return tuple(self._start(role, may_fail_alone=True) for _ in range(count))

    def set_role(self, engine_id: int, role: EngineRole) -> None:
        engine = self._desk.pool[engine_id]
        self._check_role(role)
        log.info("engine.role_changed", engine_id=engine_id, role=str(role), former=str(engine.role))
        engine.role = role
        self._router.post(RoleChanged(engine_id, role))

    def _check_role(self, role: EngineRole) -> None:
        if role is not EngineRole.MIXED and (reason := self._config.why_no_roles) is not None:
            raise RolesRefused(reason)

    def _start(self, role: EngineRole, *, may_fail_alone: bool) -> int:
        engine = self._desk.pool.add(role)
        engine_id = engine.engine_id
        try:
            self.hosts[engine_id] = self._make_host(engine_id)
        except OSError:
            self._desk.pool.remove(engine_id)
            raise
        self._scopes[engine_id] = trio.CancelScope()
        supervisor = Supervisor(
            self._config,
            engine,
            self.hosts[engine_id],
            self._desk,
            self._accountant,
            self._router,
            self._show_ready,
            may_fail_alone=may_fail_alone,
        )
        self._tasks.start_soon(self._supervise, engine, supervisor)
        return engine_id

    async def _supervise(self, engine: PooledEngine, supervisor: Supervisor) -> None:
        with self._scopes[engine.engine_id]:
            await supervisor.run()
        if engine.is_closing:
            self._remove(engine)

    def drain(self, engine_id: int, mode: DrainMode, timeout_s: float | None = None, *, force: bool = False) -> None:
        pool = self._desk.pool
        engine = pool[engine_id]
        if not force and not pool.may_end(engine_id):
            raise LastEngine(f"Engine {engine_id} is the only one that serves.")
        if not engine.is_closing:
            engine.is_closing = True
            log.info("engine.draining", engine_id=engine_id, mode=str(mode), timeout_s=timeout_s)
            self._router.post(EngineClosing(engine_id))
            self._drains[engine_id] = _Drain()
            self._tasks.start_soon(self._drain, engine, self._drains[engine_id])
        drain, now = self._drains[engine_id], trio.current_time()
        seconds = 0.0 if mode is not DrainMode.FINISH else math.inf if timeout_s is None else timeout_s
        drain.patience.deadline = min(drain.patience.deadline, now + seconds)
        if mode is DrainMode.MOVE:
            drain.moves = True
        elif mode is DrainMode.HAND_OVER:
            drain.moves, drain.moving.deadline = False, now

    def move(self, engine_id: int, count: int, target_id: int | None = None) -> int:
        source = self._desk.pool[engine_id]
        if self._config.on_engine_death != "resume":
            raise CannotMove("With --on-engine-death fail, requests end on the engine where they began.")
        targets = targets_of(self._desk.pool, source, target_id)
        num_moved = move_some(self._desk.sequences, source, count, targets)
        log.info("engine.relieved", engine_id=engine_id, num_moved=num_moved, targets=sorted(targets))
        return num_moved

    async def _drain(self, engine: PooledEngine, drain: _Drain) -> None:
        """End an engine when it holds nothing; make it so when the time is up."""
        sequences, engine_id = self._desk.sequences, engine.engine_id
        with drain.patience:
            await sequences.until_idle(engine)
        if not self._desk.pool.serves_without(engine_id):
            self._desk.fail_requests("The last engine was removed before this request was complete.")
        elif self._config.on_engine_death == "resume":
            sequences.hand_over(engine, sequences.held_by(engine.health.incarnation), with_blocks=drain.moves)
        else:
            self._desk.fail_requests("The engine of this request was removed.", sequences.requests_on(engine))
        await sequences.until_idle(engine)
        drain.moving.deadline = min(drain.moving.deadline, trio.current_time() + MOVE_LIMIT_S)
        with drain.moving:
            await sequences.until_moved(engine)
        if engine.is_given_up:
            self._remove(engine)
        else:
            self._scopes[engine_id].cancel()

    def _remove(self, engine: PooledEngine) -> None:
        engine_id = engine.engine_id
        log.info("engine.removed", engine_id=engine_id)
        self._router.post(EngineDown(engine_id, engine.health.incarnation))
        self._desk.sequences.lookups.on_engine_gone(engine_id)
        self._desk.adapters.on_engine_gone(engine)
        self._desk.pool.remove(engine_id)
        for by_engine in (self.hosts, self._scopes, self._drains):
            by_engine.pop(engine_id, None)
        self._show_removed(engine_id)
