"""Wires the upstreams of a server, to which `wiring.py` forwards requests.

handler ──Forward──▶ upstreams ──▶ another server
   ▲                   │  ▲ chooses
   │      Forwarded,   │  └─ router's `UpstreamRouting`
   │      Answered     ▼
   └────Closed──── accountant
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio

from .accountant.metrics import Metrics
from .channel import Channel
from .config.runtime_config import RuntimeConfig
from .fleet.upstream_http.upstream_client import UpstreamClient
from .fleet.upstream_probes import UpstreamProbes
from .fleet.upstreams.actor import Upstreams
from .kv_events.follower import CacheNews
from .kv_events.subscriber import EventSubscriber
from .request_desk.desk import RequestDesk
from .request_desk.upstream_pool import Upstream, UpstreamPool
from .router.balance import Balance
from .router.routing import Routing
from .router.upstream_routing import UpstreamRouting
from .upstream_prompts import UpstreamPrompts, open_prompts


@asynccontextmanager
async def open_upstreams(
    config: RuntimeConfig, desk: RequestDesk, accountant: Channel[Any], metrics: Metrics, own: Routing
) -> AsyncIterator[None]:
    """Forward requests to the upstreams of `config` until the block is left.

    `own` is the routing among this server's engines.
    """
    own_names = config.model_names if config.num_engines else ()
    pool = UpstreamPool(
        [Upstream(engine_id=desk.pool.new_id(), config=upstream) for upstream in config.upstreams],
        () if config.num_engines else config.model_names,
    )
    prefill_budget = config.engine.max_num_batched_tokens
    routing = UpstreamRouting(
        config.routing,
        prefill_budget=prefill_budget,
        affinity_tokens=config.affinity_tokens,
    )
    for upstream in pool:
        routing.add(upstream.engine_id)
        metrics.add_upstream(upstream.engine_id)

    def show(upstream: Upstream) -> None:
        metrics.set_upstream(upstream.engine_id, is_ready=upstream.is_ready, num_running=len(upstream.exchanges))

    def show_probed(upstream: Upstream) -> None:
        show(upstream)
        models = pool.models()
        passed_on = {name: length for name, length in models.items() if name not in own_names}
        shared = frozenset(own_names) & models.keys()
        if (passed_on, shared) != (desk.info.passed_on, desk.info.shared):
            names = (*own_names, *passed_on)
            desk.info = attrs.evolve(desk.info, model_names=names, passed_on=passed_on, shared=shared)

    async with UpstreamClient() as http, open_prompts(config, pool) as prompts, trio.open_nursery() as nursery:
        balance = Balance(config.routing, own, routing, prefill_budget=prefill_budget)
        desk.upstreams = Upstreams(pool, http, accountant, routing, show, prompts.find, balance)
        if not config.num_engines:
            desk.health_of_engines = pool.health
        if prompts.tokenizers:
            output = next(iter(prompts.tokenizers.values())).output
            chosen = desk.info.output if config.num_engines else output
            desk.info = attrs.evolve(desk.info, reads_forwards=True, output=chosen)
        with ExitStack() as subscribers:
            for upstream in pool:
                if (endpoint := upstream.config.kv_events) is not None and upstream.config.tokenizer is not None:
                    take = partial(_take_news, upstream, routing, prompts)
                    subscriber = EventSubscriber(endpoint, take)
                    subscribers.callback(subscriber.close)
                    await subscriber.start()
            await nursery.start(UpstreamProbes(pool, http, show_probed).run)
            yield
            nursery.cancel_scope.cancel()


def _take_news(upstream: Upstream, routing: UpstreamRouting, prompts: UpstreamPrompts, news: CacheNews) -> None:
    """Apply changes of an upstream's cache."""
    if news.is_cleared:
        routing.on_cleared(upstream.engine_id)
    routing.on_removed(upstream.engine_id, news.removed)
    routing.on_stored(upstream.engine_id, news.stored)
    upstream.num_blocks_known = news.num_blocks
    if news.block_size is not None:
        prompts.block_sizes[upstream.engine_id] = news.block_size
