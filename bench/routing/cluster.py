"""Several simulated engines behind the real routing, in virtual time.

Used by `python -m bench.routing`. Each engine is the real scheduler and block manager (`bench/simulated.py`); it tells
the routing what it caches and evicts as it happens. Only the time of a pass is made up: `--step-ms`, plus `--token-us`
for each position. A pass draws one token of each running sequence, which stands for `DECODED` of them and costs as many
passes if nothing else is in it, so that an hour of traffic takes seconds. What may go wrong between the routing and the
engines, and with an engine, are the `Conditions`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from bench.simulated import Job, PassCosts, SimulatedEngine
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.tiers import Tier
from quipu.actors.router.routing import Route, Routing

DECODED = 16
MAX_NUM_SEQS = 256
PREFILL_BUDGET = 8192


@attrs.frozen
class Conditions:
    """What is not as it should be. The first engine is the one that is slow, or dies."""

    delay_s: float = 0.0
    """Time that a prompt takes to an engine, and what an engine reports to the routing."""
    slowness: float = 1.0
    """How many times as long the first engine's passes take."""
    dies_at: float | None = None
    """When the first engine dies, as a share of the time from the first to the last arrival..."""
    away_s: float = 30.0
    """...and how long it takes until another one is there, with an empty cache."""


FINE = Conditions()


@attrs.frozen
class RoutedJob:
    """One request of a workload. Its tokens are only made when it arrives: all of them would take gigabytes."""

    arrival_s: float
    blocks: Sequence[int]
    """What stands for the tokens of each block."""
    keys: list[bytes]
    """Of the full blocks."""
    num_prompt_tokens: int
    max_tokens: int
    """How often it draws: DECODED tokens at a time here, one in `bench.apart`."""

    def job(self, number: int, block_size: int) -> Job:
        token_ids: list[int] = []
        for block in self.blocks:
            token_ids += [block] * block_size
        del token_ids[self.num_prompt_tokens :]
        token_ids += [0] * (self.num_prompt_tokens - len(token_ids))
        return Job(number, token_ids, self.num_prompt_tokens, self.keys, self.max_tokens)


@attrs.frozen
class Outcome:
    """What one policy did with a workload."""

    hit_tokens: int
    computed: list[int]
    """Prompt tokens that each engine computed."""
    waits_s: list[float]
    """Times to first token, sorted."""
    estimates_off: int
    """Requests whose estimate was not what the engine reused."""
    decision_us: float
    """Mean time of a decision."""
    num_moved: int = 0
    """Requests that another engine went on with after theirs had died."""

    @property
    def imbalance(self) -> float:
        """Prompt tokens computed by the busiest engine, over the mean."""
        return max(self.computed) * len(self.computed) / max(1, sum(self.computed))

    def wait_s(self, quantile: float) -> float:
        return self.waits_s[int(quantile * (len(self.waits_s) - 1))]


Tell = Callable[..., None]
"""Calls a method of the routing with arguments, once the routing can have heard of it."""


class CacheTeller:
    """Tells the routing what an engine caches."""

    def __init__(self, routing: Routing, slot: int, tell: Tell) -> None:
        self._routing = routing
        self._slot = slot
        self._tell = tell

    def on_stored(
        self,
        keys: Sequence[bytes],
        parent_key: bytes,
        token_ids: list[int],
        start: int,
        block_index: int,
        sequence_id: int = 0,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self._tell(self._routing.on_stored, self._slot, keys)

    def on_removed(self, keys: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        self._tell(self._routing.on_removed, self._slot, keys)

    def on_cleared(self) -> None:
        raise AssertionError("no workload resets a cache")


class _Engine:
    def __init__(self, slot: int, limits: SchedulerConfig, costs: PassCosts) -> None:
        self.slot = slot
        self.costs = costs
        self.simulated = SimulatedEngine(limits, cache_outputs=False, explain_misses=False)
        self.routes: dict[int, Route] = {}
        """Requests that were sent to it and have not ended."""
        self.has_died = False


def pass_seconds(plan: StepPlan, costs: PassCosts) -> float:
    num_decoding = plan.num_going_on + plan.chunk_counts.count(1)
    num_prefilled = sum(count for count in plan.chunk_counts if count > 1)
    positions = costs.token_s * (num_prefilled + DECODED * num_decoding)
    return positions + costs.step_s * (1 if num_prefilled else DECODED)


class Cluster:
    """Serves one workload."""

    def __init__(
        self,
        routing: Routing,
        num_engines: int,
        num_blocks: int,
        block_size: int,
        costs: PassCosts,
        max_num_seqs: int = MAX_NUM_SEQS,
        conditions: Conditions = FINE,
    ) -> None:
        """`num_blocks`: of all engines together. `max_num_seqs`: of each."""
        self._max_num_seqs = max_num_seqs
        self._routing = routing
        self._costs = costs
        self._block_size = block_size
        self._num_engines, self._share = num_engines, num_blocks // num_engines
        self._conditions = conditions
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        """What happens when, and in which order."""
        self._num_events = 0
        self._longest = 0
        self._engines: dict[int, _Engine] = {}
        """Those that live, by slot."""
        self._dead: list[_Engine] = []
        self._jobs: dict[int, Job] = {}
        """Requests that have not ended."""
        self._remaining: dict[int, int] = {}
        self._estimates: dict[int, int] = {}
        """By request, what its first engine was expected to reuse."""
        self._waits: list[float] = []
        self._arrivals: dict[int, float] = {}
        self._num_moved = 0
        self._decision_s = 0.0

    def serve(self, workload: Sequence[RoutedJob]) -> Outcome:
        """Serve a workload in order of arrival, until every request has ended."""
        self._longest = max(one.num_prompt_tokens + one.max_tokens for one in workload)
        for index in range(self._num_engines):
            self._add_engine(self._conditions.slowness if index == 0 else 1.0)
        if (share := self._conditions.dies_at) is not None:
            first, last = workload[0].arrival_s, workload[-1].arrival_s
            self._at(first + share * (last - first), partial(self._die, next(iter(self._engines.values()))))
        for number, one in enumerate(workload):
            self._run_until(one.arrival_s)
            job = one.job(number, self._block_size)
            self._jobs[number], self._remaining[number] = job, job.max_tokens
            self._arrivals[number] = self._now = one.arrival_s
            self._submit(job)
        self._run_until(math.inf)
        if self._jobs:
            raise RuntimeError(f"{len(self._jobs)} requests were never served")
        engines = [*self._dead, *self._engines.values()]
        reused = {i: n for engine in reversed(engines) for i, n in engine.simulated.reused.items()}
        return Outcome(
            sum(reused.values()),
            [sum(workload[i].num_prompt_tokens - n for i, n in engine.simulated.reused.items()) for engine in engines],
            sorted(self._waits),
            sum(self._estimates[i] != n for i, n in reused.items()),
            1e6 * self._decision_s / len(workload),
            self._num_moved,
        )

    # ------------------------------------------------------------ time

    def _at(self, when: float, what: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, what))

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self._now, _, what = heapq.heappop(self._events)
            what()

    def _after_delay(self, what: Callable[..., object], *arguments: object) -> None:
        if self._conditions.delay_s:
            self._at(self._now + self._conditions.delay_s, partial(what, *arguments))
        else:
            what(*arguments)

    # ------------------------------------------------------------ engines

    def _add_engine(self, slowness: float = 1.0) -> None:
        limits = SchedulerConfig(
            block_size=self._block_size,
            num_blocks=self._share + 1,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=PREFILL_BUDGET,
            max_steps_in_flight=2,
            max_model_len=self._longest,
        )
        costs = PassCosts(slowness * self._costs.step_s, slowness * self._costs.token_s)
        engine = _Engine(self._routing.add_engine(self._share), limits, costs)

        def tell(what: Callable[..., object], *arguments: object) -> None:
            self._after_delay(self._hear, engine, what, *arguments)

        engine.simulated.manager.pool.observers.append(CacheTeller(self._routing, engine.slot, tell))
        self._engines[engine.slot] = engine

    def _hear(self, engine: _Engine, what: Callable[..., object], *arguments: object) -> None:
        if not engine.has_died:
            what(*arguments)

    def _die(self, engine: _Engine) -> None:
        """An engine dies: others go on with its requests, and later there is another one."""
        engine.has_died = True
        del self._engines[engine.slot]
        self._dead.append(engine)
        routes, engine.routes = engine.routes, {}
        for route in routes.values():
            self._routing.drop(route)
        self._routing.remove_engine(engine.slot)
        for number in routes:
            if number in self._jobs:  # else its last token is on the way
                self._num_moved += 1
                self._submit(attrs.evolve(self._jobs[number], max_tokens=self._remaining[number]))
        self._at(self._now + self._conditions.away_s, self._add_engine)

    # ------------------------------------------------------------ requests

    def _submit(self, job: Job) -> None:
        began = time.perf_counter()
        route = self._routing.route(job.keys, job.num_prompt_tokens)
        self._decision_s += time.perf_counter() - began
        self._estimates.setdefault(job.id, route.num_overlapping)
        engine = self._engines[route.slot]
        engine.routes[job.id] = route
        self._after_delay(self._arrive, engine, job)

    def _arrive(self, engine: _Engine, job: Job) -> None:
        if engine.has_died:
            return  # it was sent again
        was_idle = not engine.simulated.plans
        engine.simulated.submit(job)
        engine.simulated.pump()
        if was_idle:
            self._begin_pass(engine)

    def _begin_pass(self, engine: _Engine) -> None:
        if plans := engine.simulated.plans:
            self._at(self._now + pass_seconds(plans[0], engine.costs), partial(self._end_pass, engine))

    def _end_pass(self, engine: _Engine) -> None:
        if engine.has_died:
            return
        done = engine.simulated.finish_step()
        num_tokens = done.num_tokens or [1] * len(done.row_ids)
        for sequence_id, start, end, num_samples in zip(
            done.row_ids, done.row_starts, done.row_ends, num_tokens, strict=True
        ):
            count = end - start
            route = engine.routes[sequence_id]
            if num_samples:
                self._note_token(engine, sequence_id, route)
            else:
                self._after_delay(self._hear, engine, self._routing.on_computed, route, count)
        engine.simulated.pump()
        self._begin_pass(engine)

    def _note_token(self, engine: _Engine, sequence_id: int, route: Route) -> None:
        arrived_at = self._arrivals.pop(sequence_id, None)
        if arrived_at is not None:
            self._waits.append(self._now + self._conditions.delay_s - arrived_at)
        if route.num_queued or route.sent is not None or not route.is_running:
            self._after_delay(self._hear, engine, self._routing.on_first_token, route)
        self._remaining[sequence_id] -= 1
        if not self._remaining[sequence_id]:
            del self._jobs[sequence_id], engine.routes[sequence_id]
            self._after_delay(self._hear, engine, self._routing.drop, route)
