"""Makes the accountant's entry store of a server, with what web layer and metrics read of it.

Used by `wiring.py` and `upstream_wiring.py`, before any actor runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cache_insight.cache_watch import CacheWatch
from ..cache_insight.explanation_store import ExplanationStore
from ..config.runtime_config import RuntimeConfig
from ..request_desk.desk import RequestDesk
from .entry_store import EntryStore
from .explainer import Explainer
from .metrics import Metrics


def make_entry_store(
    config: RuntimeConfig, desk: RequestDesk, metrics: Metrics, clock: Callable[[], float]
) -> EntryStore:
    """Return an empty store, from which `desk` and `metrics` take how the cache is used, and `desk` explanations."""
    num_kept = config.explain_requests
    watch = CacheWatch(config.stats_window_s, config.engine.block_size, clock=clock, max_paths=num_kept)
    store = EntryStore(cache=watch, explanations=ExplanationStore(num_kept))
    watch.explained = store.known_prompt
    desk.cache = watch
    desk.explain = Explainer(store, desk.num_usable_blocks_of).explain
    metrics.show_cache(watch)
    return store
