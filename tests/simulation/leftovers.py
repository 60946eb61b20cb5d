"""What a server still holds, and can say of its requests, when its clients are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.messages.explanations import ExplainedPrompt
from quipu.actors.wiring import Runtime
from tests.simulation.drawn_setup import Setup
from tests.simulation.engine_host import SimulatedHost
from tests.simulation.remains import FIRST_SEQUENCE, remains_of, stale_keys_of
from tests.simulation.seen import Explained


def leftovers_of(runtime: Runtime, journal: DurableJournal, setup: Setup) -> dict[str, int]:
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
        "slots for submits": setup.engine["submit_slots"] - desk.sequences.slots.value,
        "open lines of the ledger": journal.num_open + journal.num_held_back,
        "pending messages": len(runtime.entry_store.pending) + len(routes.reports),
    }
    loads = routes.routing.loads
    held["load that the router counts"] = int(loads.queued.sum() + loads.running.sum() + loads.blocks.sum())
    not_ready = sum(engine.ready is None or not engine.is_ready for engine in desk.pool)
    held["engines that are not ready"] = not_ready
    for engine_id, host in hosts_of(runtime).items():
        if host.process is None or host.process.has_ended:
            continue
        engine = host.process.engine
        manager = engine.block_manager
        num_idle = manager.pool.num_free + manager.pool.num_pinned_only + 1
        held[f"blocks of engine {engine_id}"] = manager.pool.num_blocks - num_idle
        held[f"allocations of engine {engine_id}"] = len(manager.allocations)
        held[f"lent blocks of engine {engine_id}"] = manager.lending.num_blocks
        if manager.tiers is not None:
            held[f"loads of engine {engine_id}"] = int(manager.tiers.loads.are_under_way)
        held[f"sequences of engine {engine_id}"] = len(engine.batcher.sequences) + engine.batcher.num_groups
    held = {what: count for what, count in held.items() if count}
    if not held:
        held = {f"numbers of sequences at {path}": count for path, count in _remains(runtime).items()}
    return held or {f"keys of blocks that are nowhere at {path}": count for path, count in _stale_keys(runtime).items()}


def _stale_keys(runtime: Runtime) -> Counter[str]:
    found: Counter[str] = Counter()
    for engine_id, host in hosts_of(runtime).items():
        if host.process is None or host.process.has_ended:
            continue
        manager = host.process.engine.block_manager
        places = [manager.pool.holds]
        if manager.tiers is not None:
            objects = manager.tiers.objects
            indexes = [tier.index for tier in manager.tiers.by_tier.values()]
            places += [objects.known.holds if index is objects else index.holds for index in indexes]

        def is_there(key: bytes, places: Sequence[Callable[[bytes], bool]] = tuple(places)) -> bool:
            return any(holds(key) for holds in places)

        found += stale_keys_of({f"engine {engine_id}": manager}, is_there)
    return found


def _remains(runtime: Runtime) -> Counter[str]:
    roots: dict[str, object] = {
        "accounts": runtime.entry_store,
        "texts": runtime.text_store,
        "jobs": runtime.job_store,
        "routes": runtime.route_store,
        "sequences": runtime.desk.sequences,
    }
    for engine_id, host in hosts_of(runtime).items():
        if host.process is not None and not host.process.has_ended:
            roots[f"engine {engine_id} block manager"] = host.process.engine.block_manager
            roots[f"engine {engine_id} batcher"] = host.process.engine.batcher
    (end,) = runtime.desk.sequences.new_sequence_ids(1)
    return remains_of(roots, FIRST_SEQUENCE, end)


def explained(prompt: ExplainedPrompt) -> Explained:
    ended = prompt.ended
    miss, evicted = (None, None) if ended is None else (ended.miss, ended.evicted)
    return Explained(
        prompt.cached_tokens,
        tuple((span.start, span.end, str(span.source), span.tier) for span in prompt.blocks),
        None if miss is None else str(miss.reason),
        None if miss is None else miss.token,
        None if ended is None else ended.diverged_from,
        None if evicted is None else evicted.at,
        None if evicted is None or evicted.by is None else evicted.by.request_id,
        None if evicted is None else evicted.idle_s,
    )


def statistics_of(runtime: Runtime) -> dict[str, int]:
    """Return the statistics that are logged, by what they count."""
    stats = runtime.entry_store.stats
    return {
        "requests": stats.total_requests,
        "hits": stats.hit_requests,
        "prompt_tokens": stats.total_prompt_tokens,
        "cached_tokens": stats.total_cached_tokens,
        "host_tokens": stats.total_host_tokens,
        "disk_tokens": stats.total_disk_tokens,
        "remote_tokens": stats.total_remote_tokens,
    }


def cache_rows_of(runtime: Runtime) -> dict[tuple[str, str], dict[str, int]]:
    """Return how each tenant has used the cache under each model name."""
    return {
        (figures.tenant or "", figures.model or ""): {
            "requests": figures.num_requests,
            "hits": figures.num_hits,
            "prompt_tokens": figures.prompt_tokens,
            "cached_tokens": figures.cached_tokens,
        }
        for figures in runtime.desk.cache.figures()
    }


def hosts_of(runtime: Runtime) -> Mapping[int, SimulatedHost]:
    return {number: host for number, host in runtime.hosts.items() if isinstance(host, SimulatedHost)}
