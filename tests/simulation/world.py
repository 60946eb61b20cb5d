"""Runs a plan: the real actors of the web process and of each engine in one loop, clients, and faults in their time.

    clients ──▶ request desk, tokenizer, router, accountant, detokenizer, journal (memory_ledger.py)
                   ══ Wire ══ scheduler, KV-block manager, fake executor, mover (engine_host.py)

What it returns is plain data, for the oracle.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import structlog
import trio

from quipu.actors.accountant.actor import Accountant
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.engine import first_leaf
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.peers.peer_link import LoopNetwork
from quipu.actors.messages.accountant import Caller
from quipu.actors.messages.handler import Closed, Delta, Started
from quipu.actors.messages.prompts import TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.request_desk.interface import DeskClosed
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.wiring import Runtime
from quipu.kernels.fake import Dials, FakeBackend
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info
from tests.simulation.arrival import BLOCK, FIRST_ID, NUM_IDS, STEP_S, Arrival
from tests.simulation.disturbances import Disturber
from tests.simulation.engine_host import SimulatedHost
from tests.simulation.memory_ledger import MemoryStorage, open_journal
from tests.simulation.plan import Plan
from tests.simulation.points import Point
from tests.simulation.tap import Tap
from tests.simulation.virtual_time import Clocks, run_virtually

MOST_S = 600.0
"""A run that has not ended by then never will."""
SETTLING_S = 120.0
"""How long the server may take to release everything after the last client and the last fault."""
SLOT_BYTES = 8

Event = tuple[Any, ...]


@attrs.define
class Watched:
    """What one client saw. Times count from the start of the run."""

    opened_at: float
    refused: str | None = None
    """Why it could not be opened."""
    events: list[Event] = attrs.field(factory=list)
    """(time, "started", prompt, cached, written), (time, "delta", choice, text, tokens, reason), (time, "closed", told,
    error, is_final)."""
    left_at: float | None = None
    """When it left before the end."""
    ended_at: float = 0.0
    was_safe: bool = True
    """Its record would have survived a crash when it saw the end."""


@attrs.define
class Seen:
    """What a run has shown."""

    plan: Plan
    watched: dict[int, Watched] = attrs.field(factory=dict)
    """By the number of the arrival."""
    ledger: bytes = b""
    metrics: str = ""
    leftovers: dict[str, int] = attrs.field(factory=dict)
    """What is still held, by what it is; empty if nothing is."""
    ended_with: str | None = None
    """The error with which the server ended."""
    last_fault_s: float = 0.0
    """When the last fault was over."""
    fault_times: list[float] = attrs.field(factory=list)
    num_engine_deaths: int = 0
    crash_times: list[float] = attrs.field(factory=list)
    """When actors crashed."""
    applied: list[str] = attrs.field(factory=list)
    """The faults that happened."""
    trace_sha256: str = ""
    num_messages: int = 0
    num_bytes: int = 0
    virtual_s: float = 0.0
    passed: Counter[Point] = attrs.field(factory=Counter)
    crashed: list[Point] = attrs.field(factory=list)


def run_plan(plan: Plan) -> Seen:
    """Run a plan in virtual time."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    return run_virtually(plan.seed, partial(_run, plan))


async def _run(plan: Plan, clocks: Clocks) -> Seen:
    seen = Seen(plan)
    tap = Tap([fault for fault in plan.faults if fault.point is not None], trio.current_time)
    world = _World(plan, clocks, tap, seen)
    with tap.installed():
        try:
            with trio.fail_after(MOST_S):
                await world.run()
        except* trio.TooSlowError:
            seen.ended_with = f"nothing ended it within {MOST_S:g} virtual seconds"
        except* Exception as group:
            error = first_leaf(group)
            seen.ended_with = f"{type(error).__name__}: {error}"
    seen.trace_sha256 = tap.sha256
    seen.num_messages, seen.num_bytes = tap.num_messages, tap.num_bytes
    seen.passed, seen.crashed = tap.passed, [fault.point for fault in tap.crashed if fault.point is not None]
    seen.applied += [str(fault) for fault in tap.crashed]
    seen.crash_times = [at - world.began for at in tap.crash_times]
    seen.fault_times += seen.crash_times
    seen.last_fault_s = max([seen.last_fault_s, *seen.fault_times])
    seen.num_engine_deaths = world.num_engine_deaths()
    return seen


class _World:
    def __init__(self, plan: Plan, clocks: Clocks, tap: Tap, seen: Seen) -> None:
        self._plan, self._clocks, self._tap, self._seen = plan, clocks, tap, seen
        self._storage = MemoryStorage()
        self._runtime: Runtime | None = None
        self.began = trio.current_time()
        self.dials: dict[int, Dials] = {}

    def _now(self) -> float:
        return trio.current_time() - self.began

    async def run(self) -> None:
        plan, setup = self._plan, self._plan.setup
        changes: dict[str, Any] = {**setup.engine}
        if setup.host_blocks:
            changes["kv_host_memory"] = setup.host_blocks * BLOCK * SLOT_BYTES
        if "engine_roles" in changes:
            changes["engine_roles"] = tuple(map(EngineRole, changes["engine_roles"]))
        config = runtime_config(**changes)
        network = LoopNetwork() if config.engine.has_peers else None
        journal = open_journal(self._storage, setup.segment_bytes, self._clocks.wall, fsync=setup.fsync)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)

            def make_host(engine_id: int) -> SimulatedHost:
                load = partial(self._load, engine_id)
                return SimulatedHost(nursery, config.engine, load, network, config.step_timeout_s)

            async with open_with_kept_vocabulary(
                config,
                serving_info(config),
                make_host,
                journal=journal,
                make_accountant=partial(Accountant, unix_time=self._clocks.wall),
                make_renderer=InlineRenderer,
            ) as runtime:
                self._runtime = runtime
                while not all(engine.is_ready for engine in runtime.desk.pool):
                    await trio.sleep(STEP_S)
                self.began = trio.current_time()
                disturber = Disturber(runtime, self._storage.dials, self.dials, self._clocks, self._tap, self.began)
                async with trio.open_nursery() as acting:
                    for arrival in plan.arrivals:
                        acting.start_soon(self._ask, runtime, arrival)
                    for fault in plan.faults:
                        if fault.point is None:
                            acting.start_soon(disturber.apply, fault)
                self._seen.fault_times += disturber.times
                self._seen.last_fault_s = max([0.0, *disturber.times])
                self._seen.applied += disturber.applied
                await self._settle(runtime)
                self._seen.virtual_s = self._now()
                self._seen.metrics = runtime.metrics.render().decode()
            self._seen.ledger = self._storage.surviving(synced=setup.fsync)
            nursery.cancel_scope.cancel()

    def num_engine_deaths(self) -> int:
        return 0 if self._runtime is None else sum(engine.num_deaths for engine in self._runtime.desk.pool)

    def _load(self, engine_id: int, config: EngineConfig) -> Executor:
        executor = load_executor(config)
        assert isinstance(executor.backend, FakeBackend)
        dials = self.dials.setdefault(
            engine_id,
            Dials(
                step_seconds=STEP_S, first_token_id=FIRST_ID, num_token_ids=NUM_IDS, most_tokens=config.fake_most_tokens
            ),
        )
        executor.backend.dials = dials
        return executor

    # ------------------------------------------------------------ clients

    async def _ask(self, runtime: Runtime, arrival: Arrival) -> None:
        await trio.sleep_until(self.began + arrival.at_s)
        watched = self._seen.watched[arrival.number] = Watched(self._now())
        caller = Caller(tenant=arrival.tenant, client_request_id=f"client-{arrival.number}")
        try:
            ticket = runtime.desk.open(_encode(arrival), "simulation", caller)
        except DeskClosed as error:
            watched.refused, watched.ended_at = str(error), self._now()
            return
        leaving = trio.CancelScope()
        if arrival.leaves_after_s is not None:
            leaving.deadline = trio.current_time() + arrival.leaves_after_s
        try:
            with leaving:
                async with trio.open_nursery() as nursery:
                    if arrival.deadline_s is not None:
                        nursery.start_soon(_expire, ticket, arrival.deadline_s)
                    await ticket.start()
                    await self._read(ticket, arrival, watched)
                    nursery.cancel_scope.cancel()
        finally:
            ticket.leave()
        watched.ended_at = self._now()
        if not any(event[1] == "closed" for event in watched.events):
            watched.left_at = watched.ended_at

    async def _read(self, ticket: Any, arrival: Arrival, watched: Watched) -> None:
        while True:
            for event in await ticket.mailbox.get():
                now = self._now()
                match event:
                    case Started():
                        numbers = (event.prompt_tokens, event.cached_tokens, event.cache_write_tokens)
                        watched.events.append((now, "started", *numbers))
                    case Delta():
                        reason = None if event.finish_reason is None else event.finish_reason.value
                        watched.events.append((now, "delta", event.index, event.text, event.num_tokens, reason))
                    case Closed():
                        record = event.record
                        told = {
                            "outcome": record.outcome.value,
                            "prompt_tokens": record.prompt_tokens,
                            "cached_tokens": record.cached_tokens,
                            "completion_tokens": record.completion_tokens,
                            "cache_write_tokens": record.cache_write_tokens,
                        }
                        error = None if event.error is None else (event.error.kind.value, event.error.message)
                        watched.events.append((now, "closed", told, error, event.is_final))
                        if event.is_final:
                            watched.was_safe = self._is_written(arrival.request_id, told["outcome"])
                        self._tap.note(arrival.request_id, list(map(str, watched.events)))
                        return
            await trio.sleep(arrival.read_pause_s)

    def _is_written(self, request_id: str, outcome: Any) -> bool:
        """Return whether the closing record of a request is where a crash cannot lose it."""
        if outcome == "rejected":
            return True  # of these a bounded number is written, later where the disk is full
        wanted = f'"request_id":"{request_id}"'.encode()
        lines = self._storage.surviving(synced=self._plan.setup.fsync).split(b"\n")
        return any(wanted in line and b'"kind":"closed"' in line for line in lines)

    # ------------------------------------------------------------ the end

    async def _settle(self, runtime: Runtime) -> None:
        """Wait until nothing is held any more, and note what still is when the time is up."""
        for _ in range(int(SETTLING_S / 0.25)):
            await trio.sleep(0.25)
            if not (leftovers := _leftovers(runtime)):
                break
        self._seen.leftovers = leftovers


def _encode(arrival: Arrival) -> Encode:
    return Encode(
        request_id=arrival.request_id,
        prompts=(TokenPrompt(arrival.prompt),),
        num_choices=arrival.num_choices,
        max_tokens=arrival.max_tokens,
        sampling=SamplingParams(max_tokens=1, temperature=arrival.temperature, seed=arrival.seed),
        stop=arrival.stop,
        include_stop=False,
        skip_special_tokens=True,
        domain=arrival.tenant,
        prompt_param="prompt",
        max_tokens_param="max_tokens",
        priority=arrival.priority,
        is_batch=arrival.is_batch,
        cache_salt=arrival.salt,
    )


async def _expire(ticket: Any, after_s: float) -> None:
    await trio.sleep(after_s)
    ticket.expire(after_s)


def _leftovers(runtime: Runtime) -> dict[str, int]:
    """Return what the server holds, apart from its caches."""
    desk, texts, jobs, routes = runtime.desk, runtime.text_store, runtime.job_store, runtime.route_store
    held: dict[str, int] = {
        "accounts": runtime.entry_store.num_open_accounts,
        "requests": desk.num_open_requests,
        "sequences": desk.num_live_sequences,
        "tracked texts": len(texts.tracked) + len(texts.prompts) + len(texts.deferred) + len(texts.pending),
        "jobs": len(jobs.pending),
        "routed sequences": len(routes.sequences) + len(routes.prefilling) + len(routes.groups),
        "unrouted sequences": len(routes.prompts) + len(routes.unrouted) + len(routes.unrouted_resumed),
        "prompts sent": len(routes.routing.sent),
    }
    not_ready = sum(engine.ready is None or not engine.is_ready for engine in desk.pool)
    held["engines that are not ready"] = not_ready
    for engine_id, host in _hosts(runtime).items():
        if host.process is None or host.process.has_ended:
            continue
        engine = host.process.engine
        manager = engine.block_manager
        num_idle = manager.pool.num_free + manager.pool.num_pinned_only + 1
        held[f"blocks of engine {engine_id}"] = manager.pool.num_blocks - num_idle
        held[f"allocations of engine {engine_id}"] = len(manager.allocations)
        held[f"sequences of engine {engine_id}"] = len(engine.batcher.sequences) + engine.batcher.num_groups
    return {what: count for what, count in held.items() if count}


def _hosts(runtime: Runtime) -> Mapping[int, SimulatedHost]:
    return {number: host for number, host in runtime.hosts.items() if isinstance(host, SimulatedHost)}
