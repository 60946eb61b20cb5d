"""Several simulated engines behind the real routing, token by token in virtual time: mixed ones, or ones with roles.

Used by `python -m bench.apart`. Each engine is the real scheduler and block manager (`bench/simulated.py`) and tells
the routing what it caches; `gpu_costs.py` says how long its steps take, `peer_moves.py` carries blocks from one to
another. With roles, a request is computed on an engine for prefill, which draws its first token; meanwhile an engine
for decoding fetches the blocks, and gets the request when the first token is known, as the web process would send it.

What must always hold: every request is served to its end; all decisions are the product's own.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs

from bench.apart.gpu_costs import GpuCosts, LinkCosts
from bench.apart.pair_choice import PairChoice
from bench.apart.peer_moves import PeerMoves
from bench.routing.cluster import CacheTeller, RoutedJob
from bench.simulated import Job, SimulatedEngine
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.block_manager.lower_tier import TierPlan
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.peers import Fetch
from quipu.actors.router.routing import Route, Routing


@attrs.frozen
class Fleet:
    """The engines of a run. Either all are mixed, or there are some of both other roles."""

    num_mixed: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    kv_tokens: int = 400_000
    """Tokens that an engine's cache holds: 52 GB of 128 KiB each."""
    block_tokens: int = 64
    max_num_seqs: int = 256
    step_tokens: int = 2048
    """The most positions in a step, as is the server's default. Blocks can be fetched once their step is over."""
    local_tokens: int = 256
    """Positions of a prompt that an engine for decoding computes itself."""
    gpu: GpuCosts = attrs.field(factory=GpuCosts)
    link: LinkCosts = attrs.field(factory=LinkCosts)

    @property
    def name(self) -> str:
        return f"mixed, {self.step_tokens}" if self.num_mixed else f"{self.num_prefill}:{self.num_decode}"


@attrs.define(eq=False)
class TimedEngine:
    """One engine, and what it is doing."""

    slot: int
    role: EngineRole
    simulated: SimulatedEngine
    routes: dict[int, Route] = attrs.field(factory=dict)
    """Requests that were sent to it, or will be, and have not ended."""
    is_stepping: bool = False
    busy_s: float = 0.0


@attrs.define(eq=False)
class _Request:
    arrival_s: float
    job: Job
    num_left: int
    is_first: bool = True
    """No token was drawn."""
    token_s: float = 0.0
    """When the last one was."""
    next_engine: TimedEngine | None = None
    """Where it goes on after its first token."""


@attrs.frozen
class Outcome:
    """What one fleet did with a workload."""

    first_s: list[float]
    """Times to first token, sorted."""
    gaps_s: list[float]
    """Times between two tokens of a request, sorted..."""
    second_s: list[float]
    """...and of these, the times between its first and second one."""
    num_prompt_tokens: int
    num_cached: int
    """Prompt tokens that were found in a cache where the prompt came first."""
    num_moved: int
    """Prompt tokens whose blocks one engine fetched from another."""
    num_again: int
    """Prompt tokens that an engine for decoding computed after an engine for prefill."""
    num_preempted: int
    num_apart: int
    """Requests whose two sides were on two engines."""
    busy_prefill: float
    """Mean share of the time from the first arrival to the last token that engines for prefill were computing..."""
    busy_decode: float
    """...and the others."""


class TimedCluster:
    """Serves one workload."""

    def __init__(self, fleet: Fleet, longest: int) -> None:
        """`longest`: the tokens of the longest request, outputs included."""
        self._fleet = fleet
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._requests: dict[int, _Request] = {}
        """Those that have not ended."""
        self._firsts, self._gaps, self._seconds = array("d"), array("d"), array("d")
        self._num_again = self._num_apart = 0
        self._routing = Routing(block_size=fleet.block_tokens, prefill_budget=fleet.step_tokens, seed=1)
        roles = [EngineRole.MIXED] * fleet.num_mixed
        roles += [EngineRole.PREFILL] * fleet.num_prefill + [EngineRole.DECODE] * fleet.num_decode
        self._engines = [self._make_engine(role, longest) for role in roles]
        self._pairs = PairChoice(self._routing, roles, fleet.local_tokens)
        self._moves: PeerMoves | None = None
        if not fleet.num_mixed:
            engines = {engine.slot: engine.simulated for engine in self._engines}
            bytes_of_a_block = fleet.gpu.kv_bytes * fleet.block_tokens
            self._moves = PeerMoves(
                engines, fleet.link, bytes_of_a_block, clock=lambda: self._now, at=self._at, on_loaded=self._pump
            )

    def _make_engine(self, role: EngineRole, longest: int) -> TimedEngine:
        fleet = self._fleet
        num_blocks = fleet.kv_tokens // fleet.block_tokens
        limits = SchedulerConfig(
            block_size=fleet.block_tokens,
            num_blocks=num_blocks + 1,
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.step_tokens,
            max_model_len=longest,
        )
        tiers = None if fleet.num_mixed else TierPlan(has_peers=True)
        simulated = SimulatedEngine(limits, cache_outputs=False, explain_misses=False, tiers=tiers)
        engine = TimedEngine(self._routing.add_engine(num_blocks), role, simulated)
        simulated.on_tokens = partial(self._note_tokens, engine)

        def tell(what: Callable[..., object], *arguments: object) -> None:
            what(*arguments)

        simulated.manager.pool.observers.append(CacheTeller(self._routing, engine.slot, tell))
        return engine

    def serve(self, workload: Sequence[RoutedJob]) -> Outcome:
        """Serve a workload in order of arrival, until every request has ended."""
        for number, one in enumerate(workload):
            self._run_until(one.arrival_s)
            self._now = one.arrival_s
            job = one.job(number, self._fleet.block_tokens)
            self._requests[number] = _Request(self._now, job, job.max_tokens)
            self._arrive(job)
        self._run_until(math.inf)
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests were never served")
        seconds = self._now - workload[0].arrival_s
        cached = {i: n for engine in reversed(self._engines) for i, n in engine.simulated.reused.items()}
        return Outcome(
            sorted(self._firsts),
            sorted(self._gaps),
            sorted(self._seconds),
            sum(one.num_prompt_tokens for one in workload),
            sum(cached.values()),
            0 if self._moves is None else self._moves.num_blocks * self._fleet.block_tokens,
            self._num_again,
            sum(engine.simulated.num_preemptions for engine in self._engines),
            self._num_apart,
            _busy((engine for engine in self._engines if engine.role is EngineRole.PREFILL), seconds),
            _busy((engine for engine in self._engines if engine.role.may_decode), seconds),
        )

    # ------------------------------------------------------------ time

    def _at(self, when: float, what: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, what))

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self._now, _, what = heapq.heappop(self._events)
            what()

    # ------------------------------------------------------------ requests

    def _arrive(self, job: Job) -> None:
        pair = self._pairs.choose(job.keys, job.num_prompt_tokens, continues=job.max_tokens > 1)
        first = self._engines[pair.first.slot]
        if pair.then is None:
            self._submit(first, job, pair.first)
            return
        assert self._moves is not None
        self._num_apart += 1
        then = self._engines[pair.then.slot]
        then.routes[job.id] = pair.then
        self._requests[job.id].next_engine = then
        self._submit(first, job, pair.first, leaves=True)
        peer = self._moves.peer_of(first.slot)
        then.simulated.manager.fetch(Fetch(job.id, job.token_ids, job.root_key, job.keys, peer))
        self._moves.carry(then.slot)

    def _submit(self, engine: TimedEngine, job: Job, route: Route, *, leaves: bool = False) -> None:
        engine.routes[job.id] = route
        engine.simulated.submit(job, leaves=leaves)
        self._pump(engine.slot)

    def _go_on(self, engine: TimedEngine, job: Job, prefilled_at: int) -> None:
        assert self._moves is not None
        engine.simulated.submit(job, num_sampled=1, peer=self._moves.peer_of(prefilled_at))
        self._pump(engine.slot)

    # ------------------------------------------------------------ steps

    def _pump(self, slot: int) -> None:
        """Have an engine plan, and begin a step if it is idle."""
        engine = self._engines[slot]
        engine.simulated.pump()
        if self._moves is not None:
            self._moves.carry(slot)
        plans = engine.simulated.plans
        if plans and not engine.is_stepping:
            engine.is_stepping = True
            seconds = self._fleet.gpu.seconds(plans[0], engine.simulated.positions)
            engine.busy_s += seconds
            self._at(self._now + seconds, partial(self._end_step, engine))

    def _end_step(self, engine: TimedEngine) -> None:
        engine.is_stepping = False
        done = engine.simulated.finish_step()
        for sequence_id, start, end in zip(done.row_ids, done.row_starts, done.row_ends, strict=True):
            request = self._requests.get(sequence_id)  # None: a row behind its last token
            if request is None or start >= request.job.num_prompt_tokens:
                continue
            if request.is_first:
                self._routing.on_computed(engine.routes[sequence_id], end - start)
            else:
                self._num_again += min(end, request.job.num_prompt_tokens) - start
        self._pump(engine.slot)

    def _note_tokens(self, engine: TimedEngine, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self._note_token(engine, sequence_id, self._requests[sequence_id], engine.routes[sequence_id])

    def _note_token(self, engine: TimedEngine, sequence_id: int, request: _Request, route: Route) -> None:
        now = self._now
        if route.sent is not None or not route.is_running:
            self._routing.on_first_token(route)
        if request.is_first:
            request.is_first = False
            self._firsts.append(now - request.arrival_s)
        else:
            gap = now - request.token_s
            self._gaps.append(gap)
            if request.num_left == request.job.max_tokens - 1:
                self._seconds.append(gap)
        request.token_s = now
        request.num_left -= 1
        if not request.num_left:
            del self._requests[sequence_id]
            self._routing.drop(engine.routes.pop(sequence_id))
        elif (next_engine := request.next_engine) is not None:
            request.next_engine = None
            self._routing.drop(engine.routes.pop(sequence_id))
            when = now + self._fleet.link.delay_s
            self._at(when, partial(self._go_on, next_engine, request.job, engine.slot))


def _busy(engines: Iterable[TimedEngine], seconds: float) -> float:
    each = [engine.busy_s / seconds for engine in engines]
    return sum(each) / len(each) if each else 0.0
