"""Makes the accountant's entry store of a server, with what web layer and metrics read of it.

Used by `wiring.py` before any actor runs. Requests are explained for the request desk: open
ones from their entries, others as kept.

What must always hold: nothing is made of a request before its tenant was compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from ..cache_insight.cache_watch import CacheWatch
from ..cache_insight.explanation_store import ExplanationStore
from ..config.runtime_config import RuntimeConfig
from ..messages.explanations import Explanation
from ..request_desk.desk import RequestDesk
from .entry_store import EntryStore
from .explaining import explain_record, explain_request
from .metrics import Metrics


def _explain(
    store: EntryStore, num_usable_blocks_of: Callable[[int], int], request_id: str, tenant: str | None, /
) -> Explanation | None:
    """Implement `interface.Explain`. `num_usable_blocks_of(engine_id)` returns the size of an engine's cache."""
    request = store.requests.get(request_id)
    if request is None:
        return store.explanations.find(request_id, tenant)
    if tenant not in (None, request.opened.caller.tenant):
        return None
    at = request.opened.received_at
    if request.num_crashes:  # its entries may be what the accountant cannot read
        return attrs.evolve(explain_record(request.bare_record(at)), is_open=True)
    account = request.account()
    record = account.record(at)
    num_blocks = num_usable_blocks_of(record.engine or 0)
    return explain_request(request, account, record, store.explanations.name_of, num_blocks, is_open=True)


def make_entry_store(
    config: RuntimeConfig, desk: RequestDesk, metrics: Metrics, clock: Callable[[], float]
) -> EntryStore:
    """Return an empty store, from which `desk` and `metrics` take how the cache is used, and `desk` explanations."""
    num_kept = config.explain_requests
    watch = CacheWatch(config.stats_window_s, config.engine.block_size, clock=clock, max_paths=num_kept)
    store = EntryStore(cache=watch, explanations=ExplanationStore(num_kept))
    watch.explained = store.known_prompt
    desk.cache = watch
    desk.explain = partial(_explain, store, desk.num_usable_blocks_of)
    metrics.show_cache(watch)
    return store
