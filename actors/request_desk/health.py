"""What is known of the server and of each of its engines: for operators, and for what depends on it.

Supervisors and probes set it (`engine_pool.py`, `upstream_pool.py`); the request desk and the web layer read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs

from ..config.engine_roles import EngineRole
from ..messages.supervisor import EngineReady


class State(StrEnum):
    """What the supervisor knows about the engine."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    REFUSING = "refusing"  # no usage record can be written, so no request is admitted
    FAILED = "failed"


class EngineState(StrEnum):
    """What is known of one of several engines."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # it gets no more prompts, and ends when it has served what it holds
    DEAD = "dead"  # a successor is about to be started, unless it died too often


class UpstreamState(StrEnum):
    """What probes know of an upstream."""

    STARTING = "starting"  # it has not answered yet
    READY = "ready"
    DOWN = "down"  # it gets no request until it answers a probe


@attrs.frozen
class EngineStatus:
    engine_id: int
    """Counted from 0, and never given again."""
    incarnation: int
    """The last process started for it; counted over all engines of the server."""
    state: EngineState
    detail: str = ""
    """Why it is not ready."""
    ready: EngineReady | None = None
    num_running: int = 0
    num_waiting: int = 0
    """Sequences, the ones on their way to it included."""
    blocks_used: int = 0
    blocks_total: int = 0
    """KV blocks without the null block; 0 until it is ready."""
    deaths: int = 0
    role: EngineRole = EngineRole.MIXED


class DrainMode(StrEnum):
    """What becomes of the sequences that a draining engine holds."""

    FINISH = "finish"  # it ends them itself; when the time is up, the rest is handed over
    HAND_OVER = "hand_over"  # other engines resume them
    MOVE = "move"  # other engines resume them, with their blocks


class UnknownEngine(Exception):
    """There is no engine of that id. Answer 404."""


class LastEngine(Exception):
    """Without this engine nothing could be served. Answer 409."""


class CannotMove(Exception):
    """No engine could continue what is to leave this one. Answer 409."""


@attrs.frozen
class Health:
    state: State
    incarnation: int
    """Engines started so far."""
    detail: str
    """Why it is not ready."""
    actor_restarts: Mapping[str, int] = attrs.field(factory=dict)
    """How often each actor of the web process died and was restarted, by name."""

    @property
    def is_ready(self) -> bool:
        """Whether a token can be produced."""
        return self.state is State.READY

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is broken; also true while the first engine loads or the server drains."""
        return self.state in (State.STARTING, State.READY, State.DRAINING)


@attrs.frozen
class Withheld:
    """Why readiness is withheld: it has not been shown yet that clients are answered."""

    state: State
    detail: str
