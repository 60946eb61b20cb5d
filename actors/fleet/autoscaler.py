"""Adds engines while work waits, and removes those that are not needed: the loop around `scaling.py`.

Run from `wiring` if the number of engines may change by itself. It adds and removes engines as an operator would, so it
does not matter where their processes run.

What must always hold: no request is computed again because an engine is removed: others fetch its blocks or, where they
cannot, it ends its own requests; nothing waits between a look and the change that follows from it; a server that shuts
down is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import structlog
import trio

from ..config.runtime_config import RuntimeConfig
from ..request_desk.engine_pool import EnginePool, PooledEngine
from ..request_desk.health import DrainMode, State
from ..request_desk.interface import EngineControl
from .scaling import Add, EngineLoad, Phase, Remove, ScalingLimits, ScalingPolicy

log = structlog.get_logger()

INTERVAL_S = 0.5


@attrs.define(eq=False)
class Autoscaler:
    _config: RuntimeConfig
    _engines: EnginePool
    _control: EngineControl
    _is_stopping: Callable[[], bool] = attrs.field(kw_only=True)
    _count_change: Callable[[str], object] = attrs.field(kw_only=True)
    """Called with `up` or `down` for each change."""
    _policy: ScalingPolicy = attrs.field(init=False)
    _added: list[int] = attrs.field(factory=list, init=False)

    @_policy.default
    def _make_policy(self) -> ScalingPolicy:
        config = self._config
        limits = ScalingLimits(
            min_engines=config.min_engines,
            max_engines=config.max_engines,
            max_num_seqs=config.engine.max_num_seqs,
            up_after_s=config.scale_up_after_s,
            down_after_s=config.scale_down_after_s,
        )
        return ScalingPolicy(limits, [engine.engine_id for engine in self._engines])

    async def run(self) -> None:
        """Look after the number of engines until cancelled."""
        while not self._is_stopping():
            match self._policy.decide(trio.current_time(), [load_of(engine) for engine in self._engines]):
                case Add() as decision:
                    self._add(decision)
                case Remove() as decision:
                    self._remove(decision)
            await trio.sleep(INTERVAL_S)

    def _add(self, decision: Add) -> None:
        for engine_id in self._added:
            if engine_id in self._engines and self._engines[engine_id].is_given_up:
                self._control.drain(engine_id, DrainMode.FINISH, None)  # the next one takes its place
        try:
            (engine_id,) = self._control.add(1)
        except (OSError, ValueError) as error:
            self._policy.note_not_added(trio.current_time())
            log.error("engine.not_added", reason=str(error))
            return
        self._added = [i for i in self._added if i in self._engines and not self._engines[i].is_closing] + [engine_id]
        self._policy.note_added(engine_id)
        self._count_change("up")
        log.info("engine.scaled_up", engine_id=engine_id, reason=decision.reason, **attrs.asdict(decision.seen))

    def _remove(self, decision: Remove) -> None:
        engine_id = decision.engine_id
        log.info("engine.scaled_down", engine_id=engine_id, reason=decision.reason, **attrs.asdict(decision.seen))
        ready = self._engines[engine_id].ready
        has_peers = ready is not None and bool(ready.peer_address)
        self._control.drain(engine_id, DrainMode.MOVE if has_peers else DrainMode.FINISH, None)
        self._count_change("down")


def load_of(engine: PooledEngine) -> EngineLoad:
    """Return what an engine has to do, as far as its last report and its queue tell."""
    return EngineLoad(
        engine.engine_id,
        _phase_of(engine),
        has_died=engine.health.state is State.RESTARTING,
        num_running=engine.num_running,
        num_waiting=engine.num_waiting + len(engine.queue),
        blocks_used=engine.num_used_blocks,
        blocks_total=engine.num_blocks,
        num_computed_tokens=engine.num_computed_tokens,
    )


def _phase_of(engine: PooledEngine) -> Phase:
    if engine.is_closing:
        return Phase.LEAVING
    if engine.is_given_up:
        return Phase.LOST
    return Phase.SERVING if engine.is_ready else Phase.COMING
