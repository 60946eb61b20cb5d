"""Makes the accountant's entry store of a server, with what web layer and metrics read of it.

Used by `wiring.py` before any actor runs. The explainer answers for the request desk what
became of a request's prompts: open requests from their entries, others as kept. It changes nothing.

What must always hold: nothing is made of a request before its tenant was compared.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..cache_insight.cache_watch import CacheWatch
from ..cache_insight.explanation_store import ExplanationStore
from ..config.runtime_config import RuntimeConfig
from ..messages.explanations import Explanation
from ..request_desk.desk import RequestDesk
from .entry_store import EntryStore, RequestEntries
from .explaining import explain_record, explain_request
from .metrics import Metrics


class Explainer:
    def __init__(self, store: EntryStore, num_usable_blocks_of: Callable[[int], int]) -> None:
        """`num_usable_blocks_of(engine_id)` returns the size of an engine's cache."""
        self._store = store
        self._num_usable_blocks_of = num_usable_blocks_of

    def explain(self, request_id: str, tenant: str | None, /) -> Explanation | None:
        """Return what is known of a request of this tenant, None: of any; None if that is nothing, or not any more."""
        request = self._store.requests.get(request_id)
        if request is None:
            return self._store.explanations.find(request_id, tenant)
        if tenant not in (None, request.opened.caller.tenant):
            return None
        return self._explain_open(request)

    def _explain_open(self, request: RequestEntries) -> Explanation:
        at = request.opened.received_at
        if request.num_crashes:  # its entries may be what the accountant cannot read
            return attrs.evolve(explain_record(request.bare_record(at)), is_open=True)
        account = request.account()
        record = account.record(at)
        num_blocks = self._num_usable_blocks_of(record.engine or 0)
        name_of = self._store.explanations.name_of
        return explain_request(request, account, record, name_of, num_blocks, is_open=True)


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
