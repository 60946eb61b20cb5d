"""The engines of this server: what is known of each, and the queue of messages to it.

Shared by the web process's actors: the router fills the queues, each engine's link empties its own; supervisors set
what is known, and the web layer reads it. An engine stays in the pool when its process dies and is started again.

What must always hold: an engine's state is never reported better than it is; ids and incarnations are never given
twice, so that an incarnation names its engine, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from ..channel import Channel
from ..config.engine_roles import EngineRole
from ..messages.accountant import StepReport
from ..messages.block_manager import LookUp
from ..messages.engine_adapters import AdapterMessage
from ..messages.peers import EndFetch, Fetch
from ..messages.scheduler import Abort, ResetPrefixCache, Submit
from ..messages.supervisor import EngineReady
from ..messages.tiers import Tier
from .health import EngineState, EngineStatus, Health, State, UnknownEngine

SequenceMessage = Submit | Abort | ResetPrefixCache | LookUp
"""What the router receives for engines..."""
EngineMessage = SequenceMessage | Fetch | EndFetch | AdapterMessage
"""...and what engines receive."""


@attrs.define(eq=False, kw_only=True)
class PoolMember:
    """An engine of this server or an upstream, across restarts of its process."""

    engine_id: int
    """Given once to an engine or an upstream."""
    health: Health
    """Of this one alone."""
    num_deaths: int = 0
    """How often it died, or went down."""

    @property
    def is_ready(self) -> bool:
        return self.health.is_ready


@attrs.define(eq=False, kw_only=True)
class PooledEngine(PoolMember):
    queue: Channel[EngineMessage] = attrs.field(factory=lambda: Channel[EngineMessage](1))
    """What the router has sent it and it has not taken. Filled with `post` alone."""
    health: Health = attrs.field(factory=lambda: Health(State.STARTING, 0, "the engine is loading"))
    ready: EngineReady | None = None
    """What it found out when it last became ready."""
    role: EngineRole = EngineRole.MIXED
    is_closing: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    adapters: set[str] = attrs.field(factory=set)
    """Digests of the adapters that it has loaded."""
    num_computed_tokens: int = 0
    """Over all its incarnations."""
    awaits_reset: bool = False
    """It was told to reset its cache, and has not reported that: it does so with its next step."""
    stale_tiers: set[Tier] = attrs.field(factory=set)
    """Lower tiers whose memory may still hold what it held before a reset."""

    @property
    def is_given_up(self) -> bool:
        """Whether it died too often, so that it is not started again."""
        return self.health.state is State.FAILED

    @property
    def num_blocks(self) -> int:
        """KV blocks without the null block; 0 until it has been ready."""
        return 0 if self.ready is None else self.ready.num_blocks - 1

    def note(self, report: StepReport) -> None:
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.num_computed_tokens += sum(report.span_ends) - sum(report.span_starts)
        if report.is_cleared and report.number > 1:  # the first one tells what a cache has that was kept
            self.awaits_reset = False
        for tier in report.tiers:
            (self.stale_tiers.add if tier.is_stale else self.stale_tiers.discard)(tier.tier)
        self.num_used_blocks = self.num_blocks - report.num_free_blocks - report.num_pinned_blocks

    def repeat_reset(self) -> None:
        """Have its next incarnation reset its cache if this one may not have done so: a cache may outlive it."""
        if self.awaits_reset or self.stale_tiers:
            self.awaits_reset = False
            self.stale_tiers.clear()
            self.queue.post(ResetPrefixCache())

    def note_gone(self) -> None:
        """Note that its process no longer holds anything."""
        self.num_running = self.num_waiting = self.num_used_blocks = 0

    @property
    def has_queued(self) -> bool:
        """Whether anything is queued for it that it could still take."""
        return len(self.queue) > 0 and not self.is_given_up

    @property
    def is_wanted(self) -> bool:
        """Whether it serves or is to serve."""
        return not self.is_closing and not self.is_given_up

    @property
    def is_open(self) -> bool:
        """Whether prompts can be sent to it."""
        return self.is_ready and not self.is_closing

    @property
    def state(self) -> EngineState:
        if self.is_ready:
            return EngineState.DRAINING if self.is_closing else EngineState.READY
        return EngineState.STARTING if self.health.state is State.STARTING else EngineState.DEAD

    def status(self) -> EngineStatus:
        return EngineStatus(
            engine_id=self.engine_id,
            incarnation=self.health.incarnation,
            state=self.state,
            detail=self.health.detail,
            ready=self.ready,
            num_running=self.num_running,
            num_waiting=self.num_waiting + len(self.queue),
            blocks_used=self.num_used_blocks,
            blocks_total=self.num_blocks,
            deaths=self.num_deaths,
            role=self.role,
        )


class EnginePool:
    """The engines, in the order of their ids."""

    def __init__(self) -> None:
        self._engines: dict[int, PooledEngine] = {}
        self._next_id = 0
        self._num_added = 0
        self.num_started = 0
        """Incarnations so far: the last one's number."""
        self.on_stale_frames: Callable[[int, int], object] = lambda num_frames, engine_id: None
        """Called with a number of frames that came from dead incarnations of an engine."""

    def __iter__(self) -> Iterator[PooledEngine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def __contains__(self, engine_id: int) -> bool:
        return engine_id in self._engines

    def __getitem__(self, engine_id: int) -> PooledEngine:
        """Return an engine. Raises UnknownEngine."""
        try:
            return self._engines[engine_id]
        except KeyError:
            raise UnknownEngine(f"There is no engine {engine_id}.") from None

    def add(self, role: EngineRole = EngineRole.MIXED) -> PooledEngine:
        engine_id = self.new_id()
        self._num_added += 1
        engine = self._engines[engine_id] = PooledEngine(engine_id=engine_id, role=role)
        return engine

    def new_id(self) -> int:
        """Return an id that no engine has, or will have."""
        self._next_id += 1
        return self._next_id - 1

    def remove(self, engine_id: int) -> None:
        del self._engines[engine_id]

    @property
    def was_ever_several(self) -> bool:
        return self._num_added > 1

    @property
    def num_desired(self) -> int:
        """Engines that serve or are to serve."""
        return sum(engine.is_wanted for engine in self)

    @property
    def num_ready(self) -> int:
        """Engines that prompts can be sent to."""
        return sum(engine.is_open for engine in self)

    def next_incarnation(self) -> int:
        self.num_started += 1
        return self.num_started

    def serves_without(self, engine_id: int) -> bool:
        """Whether another engine serves, or is about to."""
        return any(engine.is_wanted for engine in self if engine.engine_id != engine_id)

    def may_end(self, engine_id: int) -> bool:
        """Whether requests are served without an engine: one that serves is needed until another does."""
        engine = self[engine_id]
        if not engine.is_open:
            return self.serves_without(engine_id)
        return any(other.is_open for other in self if other is not engine)

    def health(self) -> Health:
        """Return the server's health: as good as its best engine's."""
        engines = [engine for engine in self if not engine.is_closing] or list(self)
        best = min(engines, key=lambda engine: _BEST_FIRST.index(engine.health.state), default=None)
        if best is None:
            return Health(State.FAILED, self.num_started, "every engine was removed")
        incarnation = max(engine.health.incarnation for engine in engines)
        detail = best.health.detail
        if best.is_ready and (missing := [engine for engine in engines if not engine.is_ready]):
            first = missing[0]
            others = f"{len(missing)} of {len(engines)} engines are not ready: engine {first.engine_id}"
            detail = f"{others}: {first.health.detail}"
        return Health(best.health.state, incarnation, detail)


_BEST_FIRST = (State.READY, State.STARTING, State.RESTARTING, State.FAILED)
