"""When engines are added and removed, rule by rule. `test_scaling_days.py` simulates whole days of load."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest

from quipu.actors.fleet.scaling import RETRY_S, STUCK_S, Add, EngineLoad, Phase, Remove, ScalingLimits, ScalingPolicy

LIMITS = ScalingLimits(min_engines=1, max_engines=4, max_num_seqs=10, up_after_s=5.0, down_after_s=60.0)
IDLE = EngineLoad(0, Phase.SERVING, blocks_total=100)
FULL = attrs.evolve(IDLE, num_running=10, num_waiting=3, blocks_used=90)


@attrs.define
class Watch:
    """A policy and the engines that it is shown, a second apart."""

    policy: ScalingPolicy
    engines: list[EngineLoad]
    now: float = 1000.0

    def look(self, num_seconds: int = 1) -> Add | Remove | None:
        """Return the first decision within `num_seconds`; None if there is none."""
        for _ in range(num_seconds):
            self.now += 1
            if (decision := self.policy.decide(self.now, self.engines)) is not None:
                return decision
        return None

    def compute(self, per_s: int, num_seconds: int) -> Add | Remove | None:
        """Let each engine that serves compute `per_s` tokens a second, and return the first decision."""
        for _ in range(num_seconds):
            self.engines = [
                attrs.evolve(its, num_computed_tokens=its.num_computed_tokens + per_s)
                if its.phase is Phase.SERVING
                else its
                for its in self.engines
            ]
            if (decision := self.look()) is not None:
                return decision
        return None

    def set_all(self, load: EngineLoad) -> None:
        self.engines = [
            attrs.evolve(load, engine_id=its.engine_id, num_computed_tokens=its.num_computed_tokens)
            for its in self.engines
        ]

    def replace(self, engine_id: int, **changes: object) -> None:
        self.engines = [attrs.evolve(its, **changes) if its.engine_id == engine_id else its for its in self.engines]


def watch(*engines: EngineLoad, **limits: float) -> Watch:
    loads = [attrs.evolve(its, engine_id=index) for index, its in enumerate(engines)]
    watched = Watch(ScalingPolicy(attrs.evolve(LIMITS, **limits), range(len(loads))), loads)
    assert watched.look() is None
    return watched


# ---------------------------------------------------------------- more


def test_added_once_work_has_waited_everywhere() -> None:
    watched = watch(FULL, FULL)
    assert watched.look(4) is None
    decision = watched.look()
    assert isinstance(decision, Add)
    assert (decision.seen.num_serving, decision.seen.num_waiting, decision.seen.num_running) == (2, 6, 20)
    assert "5.0 s" in decision.reason


def test_moment_without_work_that_waits_begins_anew() -> None:
    watched = watch(FULL)
    assert watched.look(4) is None
    watched.set_all(IDLE)
    assert watched.look() is None
    watched.set_all(FULL)
    assert watched.look(5) is None


def test_work_that_waits_on_some_is_not_enough() -> None:
    assert watch(FULL, IDLE).look(100) is None


@pytest.mark.parametrize("phase", [Phase.SERVING, Phase.LEAVING])
def test_never_more_than_the_maximum(phase: Phase) -> None:
    """An engine that is leaving counts until it has ended."""
    assert watch(FULL, attrs.evolve(FULL, phase=phase), max_engines=2).look(100) is None


@pytest.mark.parametrize(("less_each_s", "is_added"), [(4, False), (1, True)])
def test_backlog_that_is_nearly_gone_needs_no_engine(less_each_s: int, is_added: bool) -> None:
    """Waiting requests stay on their engine, so a backlog that shrinks by a fifth within the wait adds no engine."""
    watched = watch(IDLE)
    watched.set_all(FULL)
    decisions = []
    for num_waiting in range(60, 0, -less_each_s):
        watched.replace(0, num_waiting=num_waiting)
        decisions.append(watched.look())
    assert any(decisions) is is_added


def test_loading_engine_is_awaited() -> None:
    loading = EngineLoad(1, Phase.COMING)
    watched = watch(FULL, loading)
    assert watched.look(3600) is None


# ---------------------------------------------------------------- fewer


def test_removed_once_the_others_have_had_room() -> None:
    """The engine with the least to do is removed, and of equal ones the latest."""
    busy = attrs.evolve(IDLE, num_running=3)
    watched = watch(busy, attrs.evolve(busy, num_running=2), attrs.evolve(busy, num_running=2))
    assert watched.look(59) is None
    decision = watched.look()
    assert isinstance(decision, Remove)
    assert decision.engine_id == 2


@pytest.mark.parametrize(
    "load",
    [
        attrs.evolve(IDLE, num_running=4),  # 8 of 10 that one engine runs
        attrs.evolve(IDLE, num_running=1, blocks_used=40),  # 80 of 100
        attrs.evolve(IDLE, num_running=1, num_waiting=1),  # a sequence waits although there is room
    ],
    ids=["sequences", "blocks", "waiting"],
)
def test_kept_where_the_others_have_no_room(load: EngineLoad) -> None:
    assert watch(load, attrs.evolve(load, num_waiting=0)).look(1000) is None


def test_passing_wait_does_not_matter() -> None:
    """A sequence that waits at one look, and no longer at the next, does not delay the removal."""
    watched = watch(IDLE, IDLE)
    for _ in range(25):
        watched.replace(0, num_waiting=1)
        assert watched.look() is None
        watched.replace(0, num_waiting=0)
        assert watched.look() is None
    assert isinstance(watched.look(10), Remove)


def test_kept_where_the_others_are_too_slow() -> None:
    """An engine's speed is measured while work waits; two engines that together do 0.8 of it are both kept, and at 0.6
    one is removed."""
    watched = watch(FULL)
    assert isinstance(watched.compute(1000, 10), Add)
    watched.policy.note_added(1)
    watched.engines.append(attrs.evolve(IDLE, engine_id=1))
    watched.set_all(IDLE)
    assert watched.compute(400, 1000) is None
    decision = watched.compute(300, 200)
    assert isinstance(decision, Remove)
    assert (decision.seen.tokens_per_s, decision.seen.engine_tokens_per_s) == (600, 1000)


def test_never_fewer_than_the_minimum() -> None:
    assert watch(IDLE, IDLE, min_engines=2).look(1000) is None
    assert watch(IDLE).look(1000) is None


def test_loading_engine_goes_first() -> None:
    watched = watch(IDLE, EngineLoad(1, Phase.COMING))
    decision = watched.look(60)
    assert isinstance(decision, Remove)
    assert decision.engine_id == 1


def test_nothing_is_removed_while_nothing_serves() -> None:
    assert watch(EngineLoad(0, Phase.COMING), EngineLoad(1, Phase.COMING)).look(1000) is None


def test_regretted_removals_become_rarer() -> None:
    """Each time a removed engine soon had to be added again, the next removal waits twice as long."""
    watched = watch(IDLE, IDLE)
    waited: list[float] = []
    for engine_id in range(2, 8):
        since = watched.now
        decision = watched.look(10_000)
        assert isinstance(decision, Remove)
        waited.append(watched.now - since)
        watched.engines = [its for its in watched.engines if its.engine_id != decision.engine_id]
        watched.set_all(FULL)
        assert isinstance(watched.look(10), Add)
        watched.policy.note_added(engine_id)
        watched.engines.append(attrs.evolve(IDLE, engine_id=engine_id))
        watched.set_all(IDLE)
    assert all(1.9 < after / before < 2.1 for before, after in pairwise(waited))


# ---------------------------------------------------------------- engines that do not start


@pytest.mark.parametrize("ends", ["given up", "short of memory"])
def test_engine_that_cannot_start_is_tried_again_later(ends: str) -> None:
    """The wait is a minute, doubled each time; an engine that retries by itself still counts for the maximum."""
    watched = watch(FULL, max_engines=100)
    tried: list[float] = []
    for engine_id in range(1, 8):
        assert isinstance(watched.look(10_000), Add)
        tried.append(watched.now)
        watched.policy.note_added(engine_id)
        watched.engines.append(EngineLoad(engine_id, Phase.COMING))
        assert watched.look() is None
        if ends == "given up":
            watched.replace(engine_id, phase=Phase.LOST)
        else:
            watched.replace(engine_id, has_died=True)
    stuck_s = STUCK_S if ends == "short of memory" else 0
    waits = [after - before - stuck_s for before, after in pairwise(tried)]
    expected = [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, 16 * RETRY_S, 32 * RETRY_S]
    assert waits == pytest.approx(expected, abs=LIMITS.up_after_s + 5)


def test_engine_that_cannot_be_made_is_tried_again_later() -> None:
    watched = watch(FULL)
    assert isinstance(watched.look(10), Add)
    watched.policy.note_not_added(watched.now)
    assert watched.look(int(RETRY_S) - 1) is None
    assert isinstance(watched.look(2), Add)


def test_given_up_engine_is_replaced() -> None:
    watched = watch(IDLE, IDLE, min_engines=2)
    watched.replace(1, phase=Phase.LOST)
    decision = watched.look()
    assert isinstance(decision, Add)
    assert "fewer than 2" in decision.reason


# ---------------------------------------------------------------- operators


def test_engine_added_by_hand_stays() -> None:
    watched = watch(IDLE)
    watched.engines.append(attrs.evolve(IDLE, engine_id=1))
    decision = watched.look(1000)
    assert isinstance(decision, Remove)
    assert decision.engine_id == 0, "the server's own engine may be removed instead"
    watched.engines.pop(0)
    assert watched.look(1000) is None


@pytest.mark.parametrize("is_seen_leaving", [True, False])
def test_engine_removed_by_hand_is_not_replaced(is_seen_leaving: bool) -> None:
    """It is not replaced even below the minimum, until there is more to do; from then on the minimum holds again."""
    watched = watch(IDLE, IDLE, min_engines=2)
    if is_seen_leaving:
        watched.replace(1, phase=Phase.LEAVING)
        assert watched.look(100) is None
    watched.engines.pop()
    assert watched.look(1000) is None
    watched.set_all(FULL)
    assert isinstance(watched.look(10), Add)
    watched.policy.note_added(2)
    watched.engines.append(attrs.evolve(IDLE, engine_id=2))
    watched.set_all(IDLE)
    assert watched.look(1000) is None
    watched.replace(2, phase=Phase.LOST)
    assert isinstance(watched.look(1000), Add)


def test_own_removals_do_not_lower_the_minimum() -> None:
    watched = watch(IDLE, IDLE, IDLE, min_engines=2)
    decision = watched.look(100)
    assert isinstance(decision, Remove)
    watched.replace(decision.engine_id, phase=Phase.LEAVING)
    assert watched.look(100) is None
    watched.engines.pop()
    assert watched.look(100) is None
    watched.replace(0, phase=Phase.LOST)
    assert isinstance(watched.look(), Add)
