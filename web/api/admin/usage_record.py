"""`GET /v1/usage/{request_id}`: the usage record of a request, and why its prompts missed the cache.

The id is from the response header `X-Quipu-Request-Id`. A tenant's key is shown its own records, an admin key all.

What must always hold: another tenant's record is answered like one that does not exist; a tenant sees a miss as its own
client did (`miss_for_client`), and nothing of the hash chain, whose numbers count what others have sent.
"""

from __future__ import annotations

from typing import Any

import attrs
from quart_trio import QuartTrio

from quipu.actors.ledger.exporting import values_of
from quipu.actors.ledger.fields import FIELD_NAMES
from quipu.actors.ledger.reading import LedgerRecord

from ...request.errors import not_found
from ...request.request_context import current_request_context
from ..usage import miss_for_client
from .usage_source import UsageSource, find_record

_TENANT_FIELDS = (*FIELD_NAMES, "recovered")


def install_usage_record(app: QuartTrio, source: UsageSource) -> None:
    """Register the route."""

    @app.get("/v1/usage/<request_id>")
    async def usage_record(request_id: str) -> dict[str, Any]:
        principal = current_request_context().principal
        found = await find_record(source, request_id, principal)
        if found is None:
            raise not_found("No usage record exists for this request id.", "request_id", "record_not_found")
        return describe(found, for_admin=principal.is_admin)


def describe(found: LedgerRecord, *, for_admin: bool) -> dict[str, Any]:
    """Return a record under the names of the ledger's exports, with the misses of all prompts."""
    misses = found.record.cache_misses
    if not for_admin:
        misses = tuple(map(miss_for_client, misses))
    values = values_of(attrs.evolve(found, record=attrs.evolve(found.record, cache_misses=misses)))
    shown: dict[str, Any] = {"object": "usage.record"}
    shown |= values if for_admin else {name: values[name] for name in _TENANT_FIELDS}
    shown["cache_misses"] = [{"reason": miss.reason.value, "token": miss.token} for miss in misses]
    return shown
