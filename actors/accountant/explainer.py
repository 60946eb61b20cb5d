"""Answers what became of a request's prompts, for the request desk: open requests from their entries, others as kept.

Synchronous, and changes nothing. What must always hold: nothing is made of a request before its tenant was compared.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..messages.explanations import Explanation
from .entry_store import EntryStore, RequestEntries
from .explaining import explain_record, explain_request


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
