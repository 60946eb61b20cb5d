"""The engine: scheduler, KV-block manager and executor, and the mover if there are lower tiers, restarted as one group.

`Engine` connects them. `LoopHost` runs them in the web side's own loop, for tests and simulation; when serving,
`engine_server.py` runs them in a process of their own. Only this module imports the executor, and torch with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ..channel import Channel, Sender
from ..config.engine_config import EngineConfig
from ..config.pooling_config import PoolingType
from ..fleet.supervisor import Death, EngineLink
from ..grammars.grammar_gate import GrammarGate, WebMessage
from ..kv_events.event_log import EventLog
from ..messages.accountant import StepReport
from ..messages.block_manager import LookUp, MissReason, Reserve
from ..messages.engine_adapters import AdapterLoaded, AdapterMessage, KeepAdapters, LoadAdapter, UnloadAdapter
from ..messages.executor import ExecutorMessage
from ..messages.handler import LookedUp
from ..messages.mover import Lending, MoveNews, MoverMessage
from ..messages.peers import EndFetch, Fetch
from ..messages.scheduler import AnnounceKeys, Granted, Submit
from ..messages.supervisor import DraftModelMemory, EngineReady, Heartbeat
from ..shared.error_groups import first_leaf
from ..shared.image_files import read_image_format
from .block_manager.actor import answer_look_ups, end_moves, fetch_from_peers, lend_to_peers, run_block_manager
from .block_manager.reservation import BlockManager
from .executor.actor import delay_of_moves, run_adapters, run_executor, wait_until_idle
from .executor.loading import load_executor, numerics_of
from .executor.step_runner import Executor
from .mover.actor import run_mover
from .open_tiers import open_tiers
from .peers.peer_link import LoopNetwork, PeerNetwork
from .peers.traffic import PeerTraffic
from .scheduler.actor import SchedulerMessage, run_scheduler
from .scheduler.config import SchedulerConfig
from .scheduler.planning import Batcher
from .scheduler.waiting import Policy

if TYPE_CHECKING:
    from ..kv_events.publisher import EventPublisher

_WHY_UNREAD = {
    PoolingType.LAST: MissReason.NEEDS_PROMPT_LOGPROBS,
    PoolingType.MEAN: MissReason.NEEDS_EVERY_POSITION,
}
PLAN_SLOTS = 4
"""Messages of one kind that may wait between two of the actors: more than are ever in flight."""


EngineNews = StepReport | LookedUp | AdapterLoaded
"""What the actors send to the web side."""


class Engine:
    """The actors' state and channels. Submits and aborts are put into `inbox`."""

    def __init__(self, config: EngineConfig, executor: Executor, network: PeerNetwork | None = None) -> None:
        """`network` is the way to other engines, if there are any.

        Raises KvEventsError if KV events are configured and their sockets cannot be opened, OSError if others could not
        reach this engine, and what `open_tiers` raises.
        """
        self.executor = executor
        pool = executor.backend.memory_plan
        self.events: EventPublisher | None = None
        self._event_log: EventLog | None = None
        if config.kv_events is not None:
            from ..kv_events.publisher import EventPublisher  # loads ZeroMQ

            self._event_log = EventLog(config.block_size, has_lower_tiers=bool(config.lower_tiers))
            self.events = EventPublisher(config.kv_events, self._event_log)
        opened = open_tiers(config, executor)
        watermark_blocks = math.ceil(config.watermark * pool.num_blocks)
        self.block_manager = BlockManager(
            pool.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            share_pending_prefixes=config.share_pending_prefixes,
            step_overhead_tokens=config.step_overhead_tokens,
            watermark_blocks=watermark_blocks,
            max_pinned_share=config.max_pinned_share,
            why_unread=_WHY_UNREAD[config.pooling.type],
            tiers=opened.plan,
            observers=[] if self._event_log is None else [self._event_log],
        )
        self.carrier = opened.carrier
        self._copies, self._network = opened.copies, network
        self._listener = None if network is None or opened.copies is None else network.listen()
        self._write_rate = opened.write_rate
        images = read_image_format(Path(config.model_path), config.executor)
        self._scheduler_config = SchedulerConfig(
            block_size=config.block_size,
            num_blocks=pool.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=pool.max_model_len,
            eos_token_ids=frozenset(config.eos_token_ids),
            enable_prefix_caching=config.enable_prefix_caching,
            max_steps_in_flight=config.max_steps_in_flight,
            plans_late=not executor.backend.capabilities.runs_beside_host,
            watermark_blocks=watermark_blocks,
            most_positions=executor.most_tokens,
            most_draft_tokens=executor.most_draft_tokens,
            policy=Policy(config.scheduling_policy),
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            has_quotas=config.kv_quota is not None,
            max_waiting_share=config.max_waiting_share,
            whole_image_tokens=images.num_tokens if images is not None and images.is_whole else 0,
        )
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        """Make what knows of sequences and numbers reports. Blocks, their contents and events outlive it."""
        self.inbox: Channel[SchedulerMessage] = Channel(self._scheduler_config.max_num_seqs)
        self._look_ups: Channel[LookUp] = Channel(1)
        self._fetches: Channel[Fetch | EndFetch] = Channel(1)
        self._adapters: Channel[AdapterMessage] = Channel(1)
        self._gate = GrammarGate(self.executor.prepare, self.inbox)
        self.batcher = Batcher(self._scheduler_config, trio.current_time)

    async def rejoin(self) -> None:
        """Drop every sequence and keep the committed blocks, so that `run` may be called for another incarnation.

        `run` must have been cancelled; a pass that is still running is waited for. The next incarnation's first report
        has all committed keys. Pinned prefixes stay pinned.
        """
        await wait_until_idle(self.executor)
        self.executor.drop_sequences()
        self.block_manager.drop_sequences()
        self._begin_incarnation()
        self.inbox.post(AnnounceKeys())

    async def receive(self, message: WebMessage | LookUp | Fetch | EndFetch | AdapterMessage) -> None:
        """Pass on a message from the web side."""
        if isinstance(message, LookUp):
            self._look_ups.post(message)  # the web side limits how many there are
        elif isinstance(message, Fetch | EndFetch):
            if self._listener is not None:
                self._fetches.post(message)  # at most two a sequence
        elif isinstance(message, KeepAdapters | LoadAdapter | UnloadAdapter):
            self._adapters.post(message)  # a few for each adapter
        else:
            if self._event_log is not None and isinstance(message, Submit) and message.adapter:
                self._event_log.adapted.note_root(message.root_key, message.adapter)
            await self._gate.send(message)

    async def run(self, reports: Sender[EngineNews]) -> None:
        """Run the actors until cancelled or one of them raises."""
        reserve: Channel[Reserve] = Channel(PLAN_SLOTS)
        granted: Channel[Granted] = Channel(PLAN_SLOTS)
        plans: Channel[ExecutorMessage] = Channel(PLAN_SLOTS)
        async with trio.open_nursery() as nursery:
            flush_events = self.events.flush if self.events is not None else None
            moves: Channel[MoverMessage] | None = None
            if self.carrier is not None and self.block_manager.tiers is not None:
                moves, moved = Channel(PLAN_SLOTS), Channel[MoveNews](PLAN_SLOTS)
                nursery.start_soon(end_moves, self.block_manager.tiers, moved, self.inbox, moves, flush_events)
                delay = delay_of_moves(self.executor)
                peers: PeerTraffic | None = None
                if self._network is not None and self._listener is not None and self._copies is not None:
                    lending: Channel[Lending] = Channel(PLAN_SLOTS)
                    peers = PeerTraffic(self._network, self._listener, self._copies, lending)
                    nursery.start_soon(lend_to_peers, self.block_manager, lending, moves, self.inbox)
                    nursery.start_soon(fetch_from_peers, self.block_manager, self._fetches, moves)
                nursery.start_soon(run_mover, self.carrier, moves, plans, moved, delay, self._write_rate, peers)
            nursery.start_soon(run_block_manager, self.block_manager, reserve, granted, flush_events, moves)
            nursery.start_soon(answer_look_ups, self.block_manager, self._look_ups, reports, moves)
            nursery.start_soon(run_scheduler, self.batcher, self.inbox, reserve, granted, plans, reports)
            nursery.start_soon(run_executor, self.executor, plans, self.inbox, moves)
            nursery.start_soon(run_adapters, self.executor, self._adapters, plans, reports)

    def close(self) -> None:
        """Close the sockets for KV events and the files of tiers. To be called once the actors have ended."""
        if self.events is not None:
            self.events.close()
        if self._listener is not None:
            self._listener.close()
        if self.carrier is not None:
            self.carrier.close()

    def heartbeat(self) -> Heartbeat:
        """Return which step is running, and for how long."""
        running = self.executor.running_step
        return Heartbeat(0, 0.0) if running is None else Heartbeat(running.step, time.monotonic() - running.since)

    def ready(self, incarnation: int) -> EngineReady:
        """Return what the engine serves with."""
        capabilities, pool = self.executor.backend.capabilities, self.executor.backend.memory_plan
        drafts = [
            DraftModelMemory(plan.weights_bytes, plan.num_blocks * plan.block_bytes)
            for plan in (other.memory_plan for other in self.executor.others)
        ]
        return EngineReady(
            incarnation=incarnation,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            backend=capabilities.name,
            dtype=capabilities.dtype,
            kv_cache_dtype=capabilities.kv_cache_dtype,
            max_model_len=pool.max_model_len,
            instruction_set=capabilities.instruction_set,
            determinism=capabilities.determinism,
            num_threads=capabilities.num_threads,
            weights_bytes=pool.weights_bytes,
            kv_cache_bytes=pool.num_blocks * pool.block_bytes,
            workspace_bytes=pool.workspace_bytes,
            numerics=numerics_of(capabilities),
            weights=capabilities.weights,
            activations=capabilities.activations,
            peer_address="" if self._listener is None else self._listener.address,
            library=capabilities.library,
            draft_model=next(iter(drafts), None),
        )


class LoopHost:
    """Runs engines in the caller's loop, over in-memory channels."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[EngineConfig], Executor] = load_executor,
        network: PeerNetwork | None = None,
    ) -> None:
        """`network`: shared by engines that may fetch each other's blocks."""
        self._config = config
        self._load = load
        self._network = network
        self.engine: Engine | None = None
        """The engine that is running."""

    async def close(self) -> None:
        """Do nothing: an engine in this loop ends with its incarnation."""

    async def run(self, link: EngineLink) -> Death:
        engine = Engine(self._config, self._load(self._config), self._network)
        reports: Channel[EngineNews] = Channel(PLAN_SLOTS)

        async def feed() -> None:
            while True:
                for message in await link.take():
                    await engine.receive(message)

        async def tell() -> None:
            while True:
                await link.deliver(await reports.receive_all())

        self.engine = engine
        try:
            await link.deliver([engine.ready(link.incarnation)])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed)
                nursery.start_soon(tell)
                nursery.start_soon(engine.run, reports)
        except* Exception as group:
            await link.deliver(reports.take_nowait())
            error = first_leaf(group)
            step = engine.executor.running_step
            step_ids = None if step is None else tuple(step.sequence_ids)
            death = Death(f"{type(error).__name__}: {error}", step_ids=step_ids)
        finally:
            self.engine = None
            engine.close()
            engine.executor.close()
        return death


def loop_hosts(
    config: EngineConfig, load: Callable[[EngineConfig], Executor] = load_executor
) -> Callable[[int], LoopHost]:
    """Return a factory for hosts in one loop, whose engines may fetch each other's blocks if the config says so."""
    network = LoopNetwork() if config.has_peers else None
    return lambda _: LoopHost(config, load, network)
