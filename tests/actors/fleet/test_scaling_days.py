"""Days of simulated load: no more engines are added than needed, and their number does not oscillate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.fleet.scaling import Add, EngineLoad, Phase, Remove, ScalingLimits, ScalingPolicy

TICK_S = 2.0


@attrs.define
class SimulatedEngine:
    """An engine as a queue of equal requests."""

    engine_id: int
    ready_at: float
    queue: float = 0.0
    """Requests."""
    computed: float = 0.0
    is_leaving: bool = False

    def load(self, now: float, slots: int) -> EngineLoad:
        phase = Phase.COMING if now < self.ready_at else Phase.LEAVING if self.is_leaving else Phase.SERVING
        running = min(slots, int(self.queue + 0.999))
        return EngineLoad(
            self.engine_id,
            phase,
            num_running=running,
            num_waiting=max(0, int(self.queue + 0.999) - slots),
            blocks_used=running,
            blocks_total=2 * slots,
            num_computed_tokens=int(self.computed),
        )


@attrs.frozen
class Simulated:
    """What all engines have in common: slots, tokens a second in all and per sequence, and the time to load."""

    slots: int
    engine_tokens_per_s: float
    sequence_tokens_per_s: float
    request_tokens: float
    loading_s: float

    @property
    def capacity(self) -> float:
        """Requests a second that one engine can serve."""
        return min(self.engine_tokens_per_s, self.slots * self.sequence_tokens_per_s) / self.request_tokens


@attrs.frozen
class Change:
    at: float
    num_engines: int
    """After it."""


def simulate(
    simulated: Simulated, load: Callable[[float], float], noise: Iterable[float], until_s: float, limits: ScalingLimits
) -> list[Change]:
    """Return the changes under a load in requests a second, which is multiplied by the factors in `noise` in turn."""
    policy = ScalingPolicy(limits, [0])
    engines = [SimulatedEngine(0, 0.0)]
    factors, changes, num_made, now = list(noise), [], 1, 0.0
    while now < until_s:
        now += TICK_S
        serving = [its for its in engines if now >= its.ready_at and not its.is_leaving]
        arrived = load(now) * factors[int(now / TICK_S) % len(factors)] * TICK_S
        least = min(serving, key=lambda its: its.queue)
        room = [max(0.0, least.queue + arrived - its.queue) for its in serving]
        for its, share in zip(serving, room, strict=True):
            its.queue += arrived * share / (sum(room) or 1.0)
        for its in engines:
            rate = min(simulated.engine_tokens_per_s, min(its.queue, simulated.slots) * simulated.sequence_tokens_per_s)
            done = min(its.queue, rate * TICK_S / simulated.request_tokens)
            its.queue -= done
            its.computed += done * simulated.request_tokens
        engines = [its for its in engines if not (its.is_leaving and its.queue < 1e-6)]
        match policy.decide(now, [its.load(now, simulated.slots) for its in engines]):
            case Add():
                engines.append(SimulatedEngine(num_made, now + simulated.loading_s))
                policy.note_added(num_made)
                num_made += 1
            case Remove(engine_id):
                (gone,) = [its for its in engines if its.engine_id == engine_id]
                gone.is_leaving = True
            case None:
                continue
        num_engines = sum(not its.is_leaving for its in engines)
        assert limits.min_engines <= num_engines
        assert len(engines) <= limits.max_engines
        changes.append(Change(now, num_engines))
    return changes


pools = st.builds(
    Simulated,
    slots=st.integers(4, 64),
    engine_tokens_per_s=st.sampled_from([500.0, 2000.0, 20_000.0]),
    sequence_tokens_per_s=st.sampled_from([20.0, 50.0, 400.0]),
    request_tokens=st.sampled_from([50.0, 400.0, 3000.0]),
    loading_s=st.sampled_from([0.0, 10.0, 120.0]),
)
noises = st.one_of(
    st.just([1.0]),
    st.lists(st.floats(0.5, 1.5), min_size=20, max_size=200).filter(lambda them: sum(them) > 0.0),
)
MOST = ScalingLimits(min_engines=1, max_engines=6, max_num_seqs=10, up_after_s=10.0, down_after_s=60.0)
HOURS_S = 5400.0


def limits_of(simulated: Simulated) -> ScalingLimits:
    return attrs.evolve(MOST, max_num_seqs=simulated.slots)


def directions(numbers: Sequence[int]) -> list[int]:
    """Return +1 for each run of additions and -1 for each of removals."""
    return [direction for direction, _ in groupby(after - before for before, after in pairwise(numbers))]


@given(simulated=pools, share=st.floats(0.05, 5.5), noise=noises)
@settings(max_examples=settings().max_examples // 2)
def test_constant_load_settles(simulated: Simulated, share: float, noise: list[float]) -> None:
    """Under constant load, engines are added, then those no longer needed are removed; nothing changes after that."""
    level, mean = share * simulated.capacity, sum(noise) / len(noise)
    changes = simulate(simulated, lambda _: level, [its / mean for its in noise], HOURS_S, limits_of(simulated))
    assert directions([1, *(change.num_engines for change in changes)]) in ([], [1], [1, -1])


@given(simulated=pools, before=st.floats(0.05, 4.5), after=st.floats(0.05, 4.5))
@settings(max_examples=settings().max_examples // 2)
def test_step_of_load_has_bounded_changes(simulated: Simulated, before: float, after: float) -> None:
    """After a step of the load, engines are only added, only removed, or first added and then removed."""
    at = HOURS_S / 2

    def load(now: float) -> float:
        return (before if now < at else after) * simulated.capacity

    changes = simulate(simulated, load, [1.0], HOURS_S, limits_of(simulated))
    num_before = ([1] + [change.num_engines for change in changes if change.at < at])[-1]
    later = directions([num_before, *(change.num_engines for change in changes if change.at >= at)])
    assert later in ([], [1], [1, -1], [-1]), "no engine may be added after one was removed"


def test_load_that_goes_is_followed() -> None:
    """After a rush the server returns to its minimum, one engine at a time."""
    simulated = Simulated(8, 1e9, 50.0, 100.0, 10.0)

    def load(now: float) -> float:
        return (3.5 if now < 3600 else 0.1) * simulated.capacity

    changes = simulate(simulated, load, [1.0], HOURS_S, limits_of(simulated))
    numbers = [1, *(change.num_engines for change in changes)]
    assert directions(numbers) == [1, -1]
    assert max(numbers) >= 4
    assert numbers[-1] == 1
    removals = [after for before, after in pairwise(changes) if after.num_engines < before.num_engines]
    assert all(later.at - removal.at >= MOST.down_after_s for removal, later in pairwise(removals))
