"""Several simulated engines behind the real routing, in virtual time.

Used by `python -m bench.routing`. Each engine is the real scheduler and block manager (`bench/simulated.py`); it tells
the routing what it caches and evicts as it happens. Only the time of a pass is made up: `--step-ms`, plus `--token-us`
for each position. A pass draws one token of each running sequence, which stands for `DECODED` of them and costs as many
passes if nothing else is in it, so that an hour of traffic takes seconds.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

import attrs

from bench.simulated import Job, PassCosts, SimulatedEngine
from quipu.actors.messages.executor import StepPlan
from quipu.actors.router.routing import Route, Routing
from quipu.actors.scheduler.config import SchedulerConfig

DECODED = 16
MAX_NUM_SEQS = 256
PREFILL_BUDGET = 8192


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
    """In units of DECODED."""

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

    @property
    def imbalance(self) -> float:
        """Prompt tokens computed by the busiest engine, over the mean."""
        return max(self.computed) * len(self.computed) / max(1, sum(self.computed))

    def wait_s(self, quantile: float) -> float:
        return self.waits_s[int(quantile * (len(self.waits_s) - 1))]


class _Teller:
    """Tells the routing what an engine caches."""

    def __init__(self, routing: Routing, slot: int) -> None:
        self._routing = routing
        self._slot = slot

    def on_stored(
        self, keys: Sequence[bytes], parent_key: bytes, token_ids: list[int], start: int, block_index: int
    ) -> None:
        self._routing.on_stored(self._slot, keys)

    def on_removed(self, keys: Sequence[bytes]) -> None:
        self._routing.on_removed(self._slot, keys)

    def on_cleared(self) -> None:
        raise AssertionError("no workload resets a cache")


class _Engine:
    def __init__(
        self, routing: Routing, num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int
    ) -> None:
        self.slot = routing.add_engine(num_blocks)
        limits = SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks + 1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=PREFILL_BUDGET,
            max_steps_in_flight=2,
            max_model_len=max_model_len,
        )
        self.simulated = SimulatedEngine(limits, cache_outputs=False, explain_misses=False)
        self.simulated.manager.pool.observers.append(_Teller(routing, self.slot))


def pass_seconds(plan: StepPlan, costs: PassCosts) -> float:
    num_decoding = sum(count == 1 for count in plan.row_counts)
    num_prefilled = sum(plan.row_counts) - num_decoding
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
    ) -> None:
        """`num_blocks`: of all engines together. `max_num_seqs`: of each."""
        self._max_num_seqs = max_num_seqs
        self._routing = routing
        self._costs = costs
        self._block_size = block_size
        self._num_engines, self._num_blocks = num_engines, num_blocks
        self._engines: dict[int, _Engine] = {}
        self._routes: dict[int, Route] = {}
        self._remaining: dict[int, int] = {}
        self._ends: list[tuple[float, int]] = []
        self._waits: list[float] = []
        self._arrivals: dict[int, float] = {}

    def serve(self, workload: Sequence[RoutedJob]) -> Outcome:
        """Serve a workload in order of arrival, until every request has ended."""
        longest = max(one.num_prompt_tokens + one.max_tokens for one in workload)
        share = self._num_blocks // self._num_engines
        for _ in range(self._num_engines):
            engine = _Engine(self._routing, share, self._block_size, longest, self._max_num_seqs)
            self._engines[engine.slot] = engine
        decision_s = 0.0
        for number, one in enumerate(workload):
            while self._ends and self._ends[0][0] <= one.arrival_s:
                self._end_pass(*heapq.heappop(self._ends))
            decision_s += self._submit(one.job(number, self._block_size), one.arrival_s)
        while self._ends:
            self._end_pass(*heapq.heappop(self._ends))
        num_open = sum(engine.simulated.num_open for engine in self._engines.values())
        if num_open:
            raise RuntimeError(f"{num_open} requests were never served")
        reused = {i: n for engine in self._engines.values() for i, n in engine.simulated.reused.items()}
        return Outcome(
            sum(reused.values()),
            [
                sum(workload[i].num_prompt_tokens - n for i, n in engine.simulated.reused.items())
                for engine in self._engines.values()
            ],
            sorted(self._waits),
            sum(self._routes[i].num_overlapping != n for i, n in reused.items()),
            1e6 * decision_s / len(workload),
        )

    def _submit(self, job: Job, now: float) -> float:
        """Route a request, submit it, and return the seconds that the decision took."""
        began = time.perf_counter()
        route = self._routing.route(job.keys, job.num_prompt_tokens)
        took = time.perf_counter() - began
        self._routes[job.id], self._remaining[job.id] = route, job.max_tokens
        self._arrivals[job.id] = now
        engine = self._engines[route.slot].simulated
        was_idle = not engine.plans
        engine.submit(job)
        engine.pump()
        if was_idle and engine.plans:
            self._begin_pass(route.slot, now)
        return took

    def _begin_pass(self, slot: int, now: float) -> None:
        plan = self._engines[slot].simulated.plans[0]
        heapq.heappush(self._ends, (now + pass_seconds(plan, self._costs), slot))

    def _end_pass(self, now: float, slot: int) -> None:
        engine, routing = self._engines[slot].simulated, self._routing
        plan = engine.plans[0]
        engine.finish_step()
        for sequence_id, count, num_samples in zip(plan.row_ids, plan.row_counts, plan.row_samples, strict=True):
            route = self._routes[sequence_id]
            if num_samples:
                self._note_token(sequence_id, route, now)
            else:
                routing.on_computed(route, count)
        engine.pump()
        if engine.plans:
            self._begin_pass(slot, now)

    def _note_token(self, sequence_id: int, route: Route, now: float) -> None:
        arrived_at = self._arrivals.pop(sequence_id, None)
        if arrived_at is not None:
            self._waits.append(now - arrived_at)
            self._routing.on_first_token(route)
        self._remaining[sequence_id] -= 1
        if not self._remaining[sequence_id]:
            self._routing.drop(route)
