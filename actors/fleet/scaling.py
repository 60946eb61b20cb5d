"""Decides when a server gets another engine, and when one of its engines is to go.

`autoscaler.py` shows a `ScalingPolicy` the engines at short intervals, and does what it decides. One engine is added
when work has waited on all that serve, at every look for a while, and does not become much less. One goes when the
others could carry its load with room to spare, for much longer: its sequences, their blocks, and its tokens per second,
as far as it is known what an engine can do, which shows while work waits.

What must always hold: the number of engines stays within its limits, except for what operators do by hand; under a
constant load it settles; an engine that could not be started is tried again after a minute, then after longer and
longer. There is no clock here: the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import attrs

SHARE = 0.7
"""An engine is removed only while the load is below this share of what the others can carry."""
STUCK_S = 120.0
"""How long to wait for an engine that died to come back."""
RETRY_S = 60.0
"""Delay before another engine is started after one could not be; doubled after each failure..."""
MAX_DOUBLINGS = 5
"""...up to this many times."""
MAX_REGRETS = 6
"""How often the wait before a removal is doubled, if engines were added again soon after earlier ones."""
DRAINING = 0.8
"""A backlog that has shrunk to this share meanwhile will soon be gone: what waits on an engine stays there, so another
one would come too late for it."""
REGRETTED = 8
"""In multiples of the wait: an engine added within this time makes the last removal a mistake. If none is, the wait is
reset."""


class Phase(StrEnum):
    COMING = "coming"  # it loads, or has died and is started again
    SERVING = "serving"
    LEAVING = "leaving"  # it gets no more prompts, and ends when it has served what it holds
    LOST = "lost"  # it could not be started, and is given up


@attrs.frozen
class EngineLoad:
    """What an engine has to do; `autoscaler.py` makes these of the pool's engines."""

    engine_id: int
    phase: Phase
    has_died: bool = False
    """Of one that is coming: whether it is not the first process that tries."""
    num_running: int = 0
    num_waiting: int = 0
    """Sequences."""
    blocks_used: int = 0
    blocks_total: int = 0
    num_computed_tokens: int = 0
    """Since it was first started."""

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_waiting


PRESENT = (Phase.COMING, Phase.SERVING)


def present(engines: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the engines that serve or are to serve."""
    return [its for its in engines if its.phase in PRESENT]


def num_tokens_of(engines: Sequence[EngineLoad]) -> int:
    return sum(its.num_computed_tokens for its in engines)


@attrs.frozen(kw_only=True)
class ScalingLimits:
    min_engines: int
    max_engines: int
    max_num_seqs: int
    up_after_s: float
    down_after_s: float


@attrs.frozen(kw_only=True)
class Seen:
    """The numbers behind a decision."""

    num_serving: int
    num_running: int
    num_waiting: int
    tokens_per_s: float | None
    """Computed by all engines, over the time that led to the decision. None: they play no part."""
    engine_tokens_per_s: float | None
    """What one engine computed when work waited on all of them. None: that has not been seen."""


@attrs.frozen
class Add:
    reason: str
    seen: Seen


@attrs.frozen
class Remove:
    engine_id: int
    reason: str
    seen: Seen


@attrs.frozen
class _Mark:
    """The beginning of a time in which something held at every look."""

    at: float
    num_tokens: int
    num_waiting: int = 0

    def rate(self, now: float, num_tokens: int) -> float:
        """Return how many tokens were computed per second since then."""
        return (num_tokens - self.num_tokens) / (now - self.at)


class ScalingPolicy:
    """What has been seen of the engines of one server, and what follows from it."""

    def __init__(self, limits: ScalingLimits, engine_ids: Iterable[int]) -> None:
        """`engine_ids` are the engines that the server has started with."""
        self._limits = limits
        self._floor = limits.min_engines
        """Lower than the minimum after operators have removed engines by hand."""
        self._phases: dict[int, Phase] = {}
        self._own = set(engine_ids)
        """The engines that may be removed: not those that operators have added."""
        self._leaving: set[int] = set()
        """Those that are removed on a decision made here."""
        self._untried: set[int] = set()
        """Those that were added on a decision made here, and have not served yet."""
        self._died_at: dict[int, float] = {}
        self._num_failures = 0
        self._retry_at = 0.0
        self._waited: set[int] = set()
        self._saturated: _Mark | None = None
        self._calm: _Mark | None = None
        self._engine_tokens_per_s: float | None = None
        self._removed_at: float | None = None
        self._num_regrets = 0
        self._regretted_at = 0.0

    def note_added(self, engine_id: int) -> None:
        """Note which engine was added on the last decision."""
        self._own.add(engine_id)
        self._untried.add(engine_id)

    def note_not_added(self, now: float) -> None:
        """Note that no engine could be added on the last decision."""
        self._num_failures += 1
        self._retry_at = now + RETRY_S * 2 ** min(self._num_failures - 1, MAX_DOUBLINGS)

    def decide(self, now: float, engines: Sequence[EngineLoad]) -> Add | Remove | None:
        """Return what to do now, which must be done before the next look. At most one engine changes at a time."""
        self._note_phases(now, engines)
        serving = [its for its in engines if its.phase is Phase.SERVING]
        removable = self._choose(engines, serving)
        self._note_load(now, serving, removable)
        return self._addition(now, engines, serving) or self._removal(now, serving, removable)

    def _note_phases(self, now: float, engines: Sequence[EngineLoad]) -> None:
        before = self._phases
        phases = self._phases = {its.engine_id: its.phase for its in engines}
        num_present = len(present(engines))
        by_hand = [
            engine_id
            for engine_id, phase in before.items()
            if phase in PRESENT and phases.get(engine_id, Phase.LEAVING) is Phase.LEAVING
            and engine_id not in self._leaving
        ]  # fmt: skip
        if by_hand:
            self._floor = max(1, min(self._floor, num_present))
        self._floor = min(self._limits.min_engines, max(self._floor, num_present))
        if {i: p for i, p in before.items() if p in PRESENT} != {i: p for i, p in phases.items() if p in PRESENT}:
            self._saturated = self._calm = None
        for its in engines:
            if its.phase is Phase.COMING and its.has_died:
                self._died_at.setdefault(its.engine_id, now)
            else:
                self._died_at.pop(its.engine_id, None)
        for engine_id in sorted(self._untried):
            self._note_trial(now, engine_id, phases.get(engine_id, Phase.LEAVING))

    def _note_trial(self, now: float, engine_id: int, phase: Phase) -> None:
        """Note what has become of an engine that was added here."""
        if phase is Phase.COMING and not self._is_stuck(now, engine_id):
            return
        self._untried.discard(engine_id)
        if phase is Phase.SERVING:
            self._num_failures = 0
        elif phase is not Phase.LEAVING:
            self.note_not_added(now)

    def _is_stuck(self, now: float, engine_id: int) -> bool:
        return now - self._died_at.get(engine_id, now) >= STUCK_S

    def _note_load(self, now: float, serving: Sequence[EngineLoad], removable: EngineLoad | None) -> None:
        num_tokens = num_tokens_of(serving)
        num_waiting = sum(its.num_waiting for its in serving)
        waiting = {its.engine_id for its in serving if its.num_waiting}
        lasting, self._waited = waiting & self._waited, waiting
        if not serving or len(waiting) < len(serving):
            self._saturated = None
        elif self._saturated is None:
            self._saturated = _Mark(now, num_tokens, num_waiting)
        elif now - self._saturated.at >= self._limits.up_after_s:
            rate = self._saturated.rate(now, num_tokens)
            self._engine_tokens_per_s = rate / len(serving) or self._engine_tokens_per_s
            if num_waiting < DRAINING * self._saturated.num_waiting:
                self._saturated = _Mark(now, num_tokens, num_waiting)
        if removable is None or lasting or not self._fits(serving, removable):
            self._calm = None
        elif self._calm is None:
            self._calm = _Mark(now, num_tokens)

    def _fits(self, serving: Sequence[EngineLoad], removable: EngineLoad) -> bool:
        """Return whether the other engines have room for all sequences, and their blocks."""
        others = [its for its in serving if its.engine_id != removable.engine_id]
        num_sequences = sum(its.num_sequences for its in serving)
        blocks_used = sum(its.blocks_used for its in serving)
        return (
            num_sequences <= SHARE * self._limits.max_num_seqs * len(others)
            and blocks_used <= SHARE * sum(its.blocks_total for its in others)
        )  # fmt: skip

    def _addition(self, now: float, engines: Sequence[EngineLoad], serving: Sequence[EngineLoad]) -> Add | None:
        num_alive = sum(its.phase is not Phase.LOST for its in engines)
        if num_alive >= self._limits.max_engines or now < self._retry_at:
            return None
        if len(present(engines)) < self._floor:
            return Add(f"there are fewer than {self._floor}", self._seen(serving, None))
        is_awaited = any(its.phase is Phase.COMING and not self._is_stuck(now, its.engine_id) for its in engines)
        mark = self._saturated
        if is_awaited or mark is None or now - mark.at < self._limits.up_after_s:
            return None
        self._note_regret(now)
        reason = f"work has waited on all engines for {now - mark.at:.1f} s"
        return Add(reason, self._seen(serving, mark.rate(now, num_tokens_of(serving)) if now > mark.at else None))

    def _note_regret(self, now: float) -> None:
        """Have later removals wait longer, if the last one was not long ago."""
        if self._removed_at is not None and now - self._removed_at < REGRETTED * self._calm_s:
            self._num_regrets = min(self._num_regrets + 1, MAX_REGRETS)
            self._regretted_at = now
        self._removed_at = None

    @property
    def _calm_s(self) -> float:
        """How long the other engines must have had room before one goes."""
        return self._limits.down_after_s * float(1 << self._num_regrets)

    def _removal(self, now: float, serving: Sequence[EngineLoad], removable: EngineLoad | None) -> Remove | None:
        if now - self._regretted_at > REGRETTED * self._calm_s:
            self._num_regrets = 0
        mark = self._calm
        if removable is None or mark is None or now == mark.at or now - mark.at < self._calm_s:
            return None
        num_tokens = num_tokens_of(serving)
        rate, known = mark.rate(now, num_tokens), self._engine_tokens_per_s
        num_others = sum(its.engine_id != removable.engine_id for its in serving)
        if known is not None and rate > SHARE * known * num_others:
            self._calm = _Mark(now, num_tokens)
            return None
        self._leaving.add(removable.engine_id)
        self._removed_at = now
        reason = f"the others have had room for its load for {now - mark.at:.0f} s"
        return Remove(removable.engine_id, reason, self._seen(serving, rate))

    def _choose(self, engines: Sequence[EngineLoad], serving: Sequence[EngineLoad]) -> EngineLoad | None:
        """Return which engine would go next: one that does not serve yet, or that has least to do; None if none may."""
        own = [its for its in present(engines) if its.engine_id in self._own]
        if not own or not serving or len(present(engines)) <= self._floor:
            return None
        one = min(own, key=lambda its: (its.phase is Phase.SERVING, its.num_sequences, -its.engine_id))
        return one if one.phase is Phase.COMING or len(serving) > self._floor else None

    def _seen(self, serving: Sequence[EngineLoad], rate: float | None) -> Seen:
        return Seen(
            num_serving=len(serving),
            num_running=sum(its.num_running for its in serving),
            num_waiting=sum(its.num_waiting for its in serving),
            tokens_per_s=rate,
            engine_tokens_per_s=self._engine_tokens_per_s,
        )
