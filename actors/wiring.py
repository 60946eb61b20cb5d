"""READ FIRST: every channel, every actor, every restart group, on one page.

    handler ──Encode──▶ tokenizer ──Submit, Abort──▶ router ──queue──▶ ENGINE: scheduler ⇄ KV-block manager
       ▲                    │             (queue)   │   ▲              (each)    │  │ ▲
       │                 Prompted            Routed │   │StepReport              │  │ │
       │                    ▼                       ▼   │                        │  │ │
    mailbox ◀──Started── accountant ◀────────────────StepReport──────────────────┘  │ │
       ▲      Closed       │  ▲   ▲                                         StepPlan│ │StepDone
       │                Tokens│   └──Forwarded, Answering, Answered── upstreams     ▼ │
       │                   ▼  │Completed                                  ▲        executor
       └─────Delta──── detokenizer                    handler ──Forward──┘

Restart groups: each engine, whose actors are restarted together (see `supervisor.py`); and each of tokenizer,
router, detokenizer and accountant, whose successors continue from a store outside them (see `restarts.py`). The server
exits with an error only if one of them, or the last engine, keeps dying without doing any work.

The same actors run in both wirings: `single_loop` runs the engine in this event loop, over in-memory channels (tests,
simulation); `split` runs it in a process of its own, over a socket pair (serving). Torch is loaded only where the
engine runs. A server without engines has no checkpoint, and runs neither tokenizer nor router nor detokenizer.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from .accountant.actor import Accountant
from .accountant.entry_store import AccountantMessage, EntryStore
from .accountant.journal import Journal, NoJournal
from .accountant.metrics import Metrics
from .accountant.store_setup import make_entry_store
from .cache_insight.advisor import Advisor
from .channel import Channel
from .config.runtime_config import RuntimeConfig
from .detokenizer.actor import Detokenizer
from .detokenizer.decoder import Decoder
from .detokenizer.output_format import choose_format
from .detokenizer.text_store import DetokenizerMessage, TextStore
from .fleet.autoscaler import Autoscaler
from .fleet.cluster.ray_nodes import open_ray
from .fleet.cluster.remote_host import open_cluster, remote_hosts
from .fleet.engine_manager import EngineManager, MakeHost
from .fleet.processes.link_tls import tls_of
from .fleet.processes.process_host import local_hosts
from .fleet.supervisor import EngineHost
from .messages.accountant import Unsent
from .messages.tiers import Tier
from .request_desk.desk import RequestDesk
from .request_desk.engine_pool import EnginePool, PooledEngine
from .request_desk.interface import ServingInfo
from .request_desk.live_sequences import LiveSequences
from .restarts import Deaths, keep_running
from .router.actor import Router
from .router.dispatch import Dispatch
from .router.route_store import NewsInbox, RouterMessage, RouteStore
from .router.routing import Routing
from .shared.tokenizers_library import load_library
from .text_workers.chat_pool import ChatPool
from .text_workers.encode_processes import EncodeProcesses
from .text_workers.grammar_pool import make_grammar_pool
from .text_workers.image_pool import ImagePool
from .text_workers.lanes import Lanes
from .text_workers.pooled_encoder import PooledEncoder
from .text_workers.renderer import InlineRenderer, MakeRenderer
from .threads import outlive_shortages
from .tokenizer.actor import TokenizerActor
from .tokenizer.encoder import load_encoder
from .tokenizer.job_store import JobStore, TokenizerMessage
from .tokenizer.segment_cache import SegmentCache
from .tokenizer.template_source import read_template

ENGINE = "quipu.actors.engine.engine"
"""Imported by name, because only `single_loop` loads it into this process."""
UPSTREAM_WIRING = "quipu.actors.upstream_wiring"
"""Imported by name, because only a server with upstreams needs an HTTP client."""


@attrs.define
class Runtime:
    """The running actors, for the web layer and for tests."""

    desk: RequestDesk
    metrics: Metrics
    entry_store: EntryStore
    text_store: TextStore
    job_store: JobStore
    route_store: RouteStore
    hosts: Mapping[int, EngineHost]
    """By the engine's id."""
    encode_processes: EncodeProcesses | None = None
    """None: long texts are encoded in threads."""

    @property
    def host(self) -> EngineHost:
        """The first engine's."""
        return self.hosts[min(self.hosts)]


@asynccontextmanager
async def open_runtime(
    config: RuntimeConfig,
    info: ServingInfo,
    make_host: MakeHost,
    *,
    journal: Journal | None = None,
    make_accountant: Callable[..., Accountant] = Accountant,
    make_tokenizer: Callable[..., TokenizerActor] = TokenizerActor,
    make_detokenizer: Callable[..., Detokenizer] = Detokenizer,
    make_renderer: MakeRenderer = ChatPool,
    encode_apart: bool = False,
    forget_host: Callable[[int], object] = lambda engine_id: None,
) -> AsyncIterator[Runtime]:
    """Run the web process's actors, the engines of `make_host`, by id, and the upstreams, until the block is left.

    Usage records go to `journal`; without one they are not kept. `make_accountant`, `make_tokenizer` and
    `make_detokenizer` are called for each start of their actor. `encode_apart`: encode long texts, and check large
    grammars, in processes of their own instead of threads. `forget_host(engine_id)` is called when an engine has been
    removed. Raises CheckpointError, inside exception groups, for an unusable tokenizer or chat template.
    """
    journal = NoJournal() if journal is None else journal
    encodes: Channel[TokenizerMessage] = Channel(config.encode_slots)
    # these three are posted to without waiting: a few messages for each open request and each step
    routes: Channel[RouterMessage] = Channel(1)
    accounts: Channel[Any] = Channel(config.report_slots)  # of AccountantMessage
    texts: Channel[DetokenizerMessage] = Channel(config.report_slots)
    sequences = LiveSequences(routes, config.submit_slots, resumes=config.on_engine_death == "resume")
    engines = EnginePool()
    name = config.model_names[0] if config.model_names else "upstream"
    metrics = Metrics(name, config.num_engines, lower_tiers=[Tier(name) for name in config.engine.lower_tiers])
    desk = RequestDesk(
        info,
        encoder=encodes,
        sequences=sequences,
        engines=engines,
        accountant=accounts,
        detokenizer=texts,
        metrics=metrics.render,
        trouble=lambda: journal.trouble,
        max_open_requests=config.max_open_requests,
        max_loras=config.engine.max_loras,
        lora_modules=config.lora_modules,
    )
    sequences.on_unsent = lambda sequence_id: accounts.post(Unsent(sequence_id))
    sequences.on_resumed = metrics.count_resumed
    engines.on_stale_frames = metrics.stale_frames.inc
    entry_store = make_entry_store(config, desk, metrics, trio.current_time)
    text_store, job_store = TextStore(), JobStore()
    route_store = RouteStore(
        Routing(
            config.routing,
            block_size=config.engine.block_size,
            prefill_budget=config.engine.max_num_batched_tokens,
            affinity_tokens=config.affinity_tokens,
            tier_weights={
                Tier.HOST: config.host_cache_hit_weight,
                Tier.DISK: config.disk_cache_hit_weight,
                Tier.REMOTE: config.remote_cache_hit_weight,
            },
        )
    )
    entry_store.cache.held_by = route_store.held_blocks
    deaths: dict[str, Deaths] = {}
    desk.actor_restarts = lambda: {actor: its.num_restarts for actor, its in deaths.items()}

    def show_ready(engine: PooledEngine) -> None:
        metrics.add_engine(engine.engine_id)
        metrics.set_blocks(engine.engine_id, total=engine.num_blocks, free=engine.num_blocks, cached=0)

    def show_removed(engine_id: int) -> None:
        metrics.forget_engine(engine_id)
        entry_store.cache.on_engine_gone(engine_id)
        forget_host(engine_id)

    metrics.show_pool(engines, lambda: desk.info.adapters)
    news = NewsInbox(route_store, routes)
    desk.control = manager = EngineManager(
        config, make_host, desk, accounts, news, show_ready=show_ready, show_removed=show_removed
    )
    runtime = Runtime(desk, metrics, entry_store, text_store, job_store, route_store, manager.hosts)

    def keep(
        actor: str,
        start: Callable[[], Awaitable[None]],
        progress: Callable[[], int],
        on_death: Callable[[], str | None],
    ) -> None:
        """Run an actor, whose successors continue from its store."""
        deaths[actor] = Deaths(
            actor,
            max_restarts=config.max_restarts,
            window_s=config.restart_window_s,
            progress=progress,
            count=metrics.count_restart,
        )
        nursery.start_soon(keep_running, start, deaths[actor], on_death)

    async def run_accountant() -> None:
        await make_accountant(entry_store, metrics, desk, journal, texts).run(accounts)

    async def start_engines() -> None:
        """Start the engines, and the actors that need their checkpoint."""
        folder = Path(config.engine.model_path)
        library = load_library(folder)
        encoder, decoder = load_encoder(library), Decoder(library)
        images = ImagePool.of(config.engine)
        chat_template = read_template(folder, lists_parts=images.format is not None)
        template_text = None if chat_template is None else chat_template.text
        chosen = choose_format(folder, library, template_text, config.tool_call_parser, config.reasoning_parser)
        desk.info = attrs.evolve(desk.info, output=chosen.output, images=images.format)
        renderer = make_renderer(chat_template, config.chat_template_timeout_s)
        processes = runtime.encode_processes = EncodeProcesses(encoder, library.source) if encode_apart else None
        lanes = Lanes(config.max_encode_waiting, config.max_encode_waiting_bytes, encoder, processes)
        segments = SegmentCache(config.token_cache_bytes)
        advisor = Advisor(entry_store.explanations.had_reasoning) if config.explain_requests else None
        vocab_size = config.vocab_size if library.max_token_id >= config.vocab_size else None
        prompt_encoder = PooledEncoder(encoder, decoder, renderer, lanes, segments, vocab_size, advisor, images)
        grammars = make_grammar_pool(library.source, config, check_apart=encode_apart)

        async def run_tokenizer() -> None:
            on_death = deaths["tokenizer"].record
            tokenizer = make_tokenizer(
                job_store, config, encoder, desk, accounts, prompt_encoder, grammars, nursery, on_death
            )
            await tokenizer.run(encodes)

        async def run_router() -> None:
            dispatch = Dispatch(
                route_store, engines, sequences, accounts, config.resume_on, config.prefill_local_tokens
            )
            await Router(route_store, dispatch).run(routes)

        def record_router_death() -> str | None:
            sequence_id = route_store.record_death()
            live = None if sequence_id is None else sequences.find(sequence_id)
            return None if live is None else live.request_id

        async def run_detokenizer() -> None:
            await make_detokenizer(text_store, decoder, accounts, sequences.abort, chosen.template).run(texts)

        for pool in (renderer, grammars, images):
            await nursery.start(pool.run)
        nursery.start_soon(lanes.run)
        keep("tokenizer", run_tokenizer, lambda: job_store.num_handled, job_store.record_death)
        keep("router", run_router, lambda: route_store.num_handled, record_router_death)
        keep("detokenizer", run_detokenizer, lambda: text_store.progress, text_store.record_death)
        await nursery.start(manager.run)
        nursery.start_soon(desk.adapters.run)
        if config.autoscales:
            autoscaler = Autoscaler(
                config, engines, manager, is_stopping=lambda: desk.is_draining, count_change=metrics.count_scaling
            )
            nursery.start_soon(outlive_shortages, autoscaler.run, "autoscaler")

    async with trio.open_nursery() as nursery:
        keep("accountant", run_accountant, lambda: entry_store.num_handled, entry_store.record_crash)
        if config.num_engines:
            await start_engines()
        async with AsyncExitStack() as stack:
            if config.upstreams:
                open_upstreams = importlib.import_module(UPSTREAM_WIRING).open_upstreams
                await stack.enter_async_context(open_upstreams(config, desk, accounts, metrics, route_store.routing))
            yield runtime
        nursery.cancel_scope.cancel()


def single_loop(config: RuntimeConfig, info: ServingInfo, load_executor: Callable[..., Any] | None = None) -> Any:
    """Run everything in this event loop. Returns an async context manager that yields a `Runtime`."""
    engine = importlib.import_module(ENGINE)
    hosts = engine.loop_hosts(config.engine, *([load_executor] if load_executor else []))
    return open_runtime(config, info, hosts, make_renderer=InlineRenderer)


@asynccontextmanager
async def split(config: RuntimeConfig, info: ServingInfo, journal: Journal | None = None) -> AsyncIterator[Runtime]:
    """Run each engine in its own process, here or on a cluster, until the block is left. Raises CheckpointError."""
    async with AsyncExitStack() as stack:
        make_host: MakeHost
        if config.cluster is None or not config.num_engines:
            make_host, forget = local_hosts(config)
        else:
            ray = open_ray(
                config.cluster, config.engine.model_path, config.num_engines, config.engine.tensor_parallel_size
            )
            nodes = await stack.enter_async_context(ray)
            cluster = await stack.enter_async_context(
                open_cluster(nodes, config.cluster.link_address, tls_of(config.cluster))
            )
            make_host, forget = remote_hosts(config, cluster), nodes.forget
        yield await stack.enter_async_context(
            open_runtime(config, info, make_host, journal=journal, encode_apart=True, forget_host=forget)
        )


__all__ = ["AccountantMessage", "Runtime", "open_runtime", "single_loop", "split"]
