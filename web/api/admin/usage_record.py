"""`GET /v1/usage/{request_id}`: the one record of a request, and why its prompts missed the cache.

Named by the server's own id, as `X-Quipu-Request-Id` said it. A tenant's key is shown its own records, an admin key
all of them.

What must always hold: a record of somebody else's is answered like one that does not exist; a tenant is told a miss as
its own client was (`told_miss`), and nothing of the chain, whose numbers count what others sent.
"""

from __future__ import annotations

from typing import Any

import attrs
from quart_trio import QuartTrio

from quipu.actors.ledger.exporting import values_of
from quipu.actors.ledger.fields import FIELD_NAMES
from quipu.actors.ledger.reading import LedgerRecord, Query

from ...request.errors import not_found
from ...request.principal import Principal
from ...request.request_context import current_request_context
from ..usage import told_miss
from .usage_source import UsageSource

_TENANT_FIELDS = (*FIELD_NAMES, "recovered")


def install_usage_record(app: QuartTrio, source: UsageSource) -> None:
    """Register the route."""

    @app.get("/v1/usage/<request_id>")
    async def usage_record(request_id: str) -> dict[str, Any]:
        principal = current_request_context().principal
        found = None
        if request_id.isprintable():  # the others are no ids, and not every database takes them
            found = await source.record(_query(request_id, principal))
        if found is None:
            raise not_found("No usage record exists for this request id.", "request_id", "record_not_found")
        return describe(found, for_admin=principal.is_admin)


def _query(request_id: str, principal: Principal) -> Query:
    return Query(request_ids=(request_id,), tenants=() if principal.is_admin else (principal.tenant,))


def describe(found: LedgerRecord, *, for_admin: bool) -> dict[str, Any]:
    """Under the names that the ledger's exports have; the misses of a list of prompts one by one."""
    misses = found.record.cache_misses
    if not for_admin:
        misses = tuple(map(told_miss, misses))
    values = values_of(attrs.evolve(found, record=attrs.evolve(found.record, cache_misses=misses)))
    shown: dict[str, Any] = {"object": "usage.record"}
    shown |= values if for_admin else {name: values[name] for name in _TENANT_FIELDS}
    shown["cache_misses"] = [{"reason": miss.reason.value, "token": miss.token} for miss in misses]
    return shown
