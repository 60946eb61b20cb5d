"""Runs a plan: the real actors of the web process and of each engine in one loop, clients, and faults in their time.

    clients ──▶ request desk, tokenizer, router, accountant, detokenizer, journal (memory_ledger.py)
                   ══ Wire ══ scheduler, KV-block manager, fake executor, mover (engine_host.py)

What it returns is plain data, for the oracle.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
import trio

from quipu.actors import wiring
from quipu.actors.accountant import divided_account, request_entries
from quipu.actors.accountant.actor import Accountant
from quipu.actors.accountant.divided_account import PART_SEQUENCES
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.executor import loading
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.peers.peer_link import LoopNetwork
from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.messages.scheduler import GRAMMAR_LOST
from quipu.actors.shared.error_groups import first_leaf
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.wiring import Runtime
from quipu.kernels.fake import Dials, FakeBackend
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info
from tests.simulation.arrival import ADAPTERS, BLOCK, FIRST_ID, NUM_IDS, SLOT_BYTES, STEP_S
from tests.simulation.clients import Clients
from tests.simulation.disturbances import Disturber, failing_disk
from tests.simulation.drawn_setup import Setup
from tests.simulation.engine_host import SimulatedHost
from tests.simulation.expected import encoded
from tests.simulation.expected_thoughts import END_OF_THOUGHT
from tests.simulation.fake_grammars import Checks, MaskFaults, Masks
from tests.simulation.leftovers import cache_rows_of, explained, hosts_of, leftovers_of, statistics_of
from tests.simulation.memory_bucket import URL, BucketDials, stood_in_for_buckets
from tests.simulation.memory_ledger import MemoryStorage, open_journal
from tests.simulation.plan import Plan
from tests.simulation.remains import FIRST_SEQUENCE
from tests.simulation.seen import Seen
from tests.simulation.tap import Tap
from tests.simulation.virtual_time import Clocks, run_virtually

MOST_S = 1200.0
"""A run that has not ended by then never will."""
SETTLING_S = 40.0
"""How long the server may take to release everything after the last client and the last fault."""
RECORD_BYTES = 8192
"""Of a block on disk."""
MEMORY = Path("/dev/shm")
"""Where the tier on a disk is, if possible: a real disk has the whole loop wait."""
ADAPTER_FOLDERS = {name: str(Path(__file__).parent / "adapters" / name) for name in ADAPTERS}


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
    with tap.installed(), _accounts_of(plan):
        try:
            with trio.fail_after(MOST_S):
                await world.run()
        except* trio.TooSlowError:
            seen.ended_with = f"nothing ended it within {MOST_S:g} virtual seconds"
        except* Exception as group:
            error = first_leaf(group)
            seen.ended_with = f"{type(error).__name__}: {error}"
    seen.trace_sha256, seen.passes = tap.sha256, tap.passes
    seen.num_messages, seen.num_bytes = tap.num_messages, tap.num_bytes
    seen.passed, seen.crashed = tap.passed, [fault.point for fault in tap.crashed if fault.point is not None]
    seen.applied += [str(fault) for fault in tap.crashed]
    seen.crash_times = [at - world.began for at in tap.crash_times]
    seen.deaths = [at - world.began for at in tap.death_times]
    seen.passes.resumed_at = {i: at - world.began for i, at in tap.passes.resumed_at.items()}
    seen.last_fault_s = max([0.0, *seen.crash_times, *(fault.over_s for fault in seen.happened)])
    seen.num_engine_deaths = world.num_engine_deaths()
    return seen


@contextmanager
def _accounts_of(plan: Plan) -> Iterator[None]:
    """Have half of the seeds divide the account of every request with several prompts, which changes no number."""
    most = 1 if plan.seed % 2 else PART_SEQUENCES
    with (
        mock.patch.object(divided_account, "PART_SEQUENCES", most),
        mock.patch.object(request_entries, "PART_SEQUENCES", most),
    ):
        yield


class _World:
    def __init__(self, plan: Plan, clocks: Clocks, tap: Tap, seen: Seen) -> None:
        self._plan, self._clocks, self._tap, self._seen = plan, clocks, tap, seen
        self._storage = MemoryStorage()
        self._runtime: Runtime | None = None
        self._mask_faults, self._bucket = MaskFaults(), BucketDials()
        self.began = trio.current_time()
        self.dials: dict[int, Dials] = {}

    def _now(self) -> float:
        return trio.current_time() - self.began

    async def run(self) -> None:
        setup = self._plan.setup
        with _stood_in_for(self._mask_faults, setup), stood_in_for_buckets(self._bucket), _disk_of(setup) as folder:
            await self._run(folder)

    async def _run(self, folder: str | None) -> None:
        plan, setup = self._plan, self._plan.setup
        config = runtime_config(**_changes(setup, folder))
        network = LoopNetwork() if config.engine.has_peers else None
        journal = open_journal(
            self._storage, setup.segment_bytes, self._clocks.wall, fsync=setup.fsync, padding=setup.ledger_padding
        )
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
                runtime.desk.sequences.new_sequence_ids(FIRST_SEQUENCE)
                while not all(engine.is_ready for engine in runtime.desk.pool):
                    await trio.sleep(STEP_S)
                self._seen.adapters = {name: each.digest for name, each in runtime.desk.adapters.served().items()}
                self.began = trio.current_time()
                clients = Clients(runtime, journal, self._storage, self._tap, self._seen, self.began)
                await self._disturb(runtime, clients)
                if not await self._settle(runtime, journal):
                    self._tap.disarm()
                    for dials in self.dials.values():
                        dials.fail_steps = 0
                    self._mask_faults.num_to_lose = 0
                    self._bucket.num_to_damage = self._bucket.num_to_lose = 0
                    for host in hosts_of(runtime).values():
                        if host.wire is not None:
                            host.wire.mend()
                    async with trio.open_nursery() as acting:
                        for arrival in plan.afterwards:
                            acting.start_soon(clients.ask, arrival)
                    await self._settle(runtime, journal)
                self._seen.virtual_s = self._now()
                self._seen.engines_left = tuple(engine.engine_id for engine in runtime.desk.pool)
                self._seen.metrics = runtime.metrics.render().decode()
                self._seen.statistics, self._seen.cache_rows = statistics_of(runtime), cache_rows_of(runtime)
                for arrival in plan.all_arrivals:
                    if (explanation := runtime.desk.explain(arrival.request_id, None)) is not None:
                        self._seen.explained[arrival.number] = tuple(map(explained, explanation.prompts))
            self._seen.ledger = self._storage.surviving(synced=setup.fsync)
            self._seen.num_segments = len(self._storage.files)
            nursery.cancel_scope.cancel()

    async def _disturb(self, runtime: Runtime, clients: Clients) -> None:
        """Have clients ask, and faults come, in their time."""
        disk, plan = self._storage.dials, self._plan
        faults = self._mask_faults, self._bucket
        disturber = Disturber(runtime, disk, self.dials, *faults, self._clocks, self._tap, self.began)
        with failing_disk(disturber.disk_dials):
            async with trio.open_nursery() as acting:
                for arrival in plan.arrivals:
                    acting.start_soon(clients.ask, arrival)
                for fault in plan.faults:
                    if fault.point is None:
                        acting.start_soon(disturber.apply, fault)
        self._seen.happened = disturber.happened
        self._seen.resets += [fault.began_s for fault in disturber.happened if fault.kind == "reset cache"]
        self._seen.applied += disturber.applied

    def num_engine_deaths(self) -> int:
        return 0 if self._runtime is None else sum(engine.num_deaths for engine in self._runtime.desk.pool)

    def _load(self, engine_id: int, config: EngineConfig) -> Executor:
        executor = loading.load_executor(config)
        assert isinstance(executor.backend, FakeBackend)
        dials = self.dials.setdefault(
            engine_id,
            Dials(
                step_seconds=STEP_S,
                first_token_id=FIRST_ID,
                num_token_ids=NUM_IDS,
                most_tokens=config.fake_most_tokens,
                applies_rules=True,
            ),
        )
        executor.backend.dials = dials
        return executor

    # ------------------------------------------------------------ the end

    async def _settle(self, runtime: Runtime, journal: DurableJournal) -> dict[str, int]:
        """Wait until nothing is held any more, and note and return what still is when the time is up."""
        leftovers: dict[str, int] = {}
        for _ in range(int(SETTLING_S / 0.25)):
            await trio.sleep(0.25)
            leftovers = leftovers_of(runtime, journal, self._plan.setup)
            if journal.trouble is not None:
                leftovers["trouble with the ledger"] = 1
            if not leftovers:
                break
        self._seen.leftovers = leftovers
        return leftovers


def _changes(setup: Setup, folder: str | None) -> dict[str, Any]:
    """Return the settings that differ from those of other tests."""
    changes: dict[str, Any] = {**setup.engine, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    if setup.host_blocks:
        changes["kv_host_memory"] = setup.host_blocks * BLOCK * SLOT_BYTES
    if folder is not None:
        changes |= {"kv_disk": folder, "kv_disk_size": setup.disk_blocks * RECORD_BYTES + (1 << 18)}
    if setup.has_objects:
        changes["kv_remote"] = URL
    if setup.has_adapters:
        changes["lora_modules"] = ADAPTER_FOLDERS
    if "engine_roles" in changes:
        changes["engine_roles"] = tuple(map(EngineRole, changes["engine_roles"]))
    return changes


@contextmanager
def _stood_in_for(faults: MaskFaults, setup: Setup) -> Iterator[None]:
    """Put what needs no process in the place of the two sides of grammars."""
    masks = Masks(faults, GRAMMAR_LOST, encoded(END_OF_THOUGHT), setup.engine["eos_token_ids"])
    checks = Checks()
    with (
        mock.patch.object(loading, "_make_masks", lambda config: masks),
        mock.patch.object(wiring, "make_grammar_pool", lambda *_, **__: checks),
    ):
        yield


@contextmanager
def _disk_of(setup: Setup) -> Iterator[str | None]:
    """Make a folder for the tier on a disk, if there is one."""
    if not setup.disk_blocks:
        yield None
        return
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="quipu-simulation-", dir=memory) as folder:
        yield folder
