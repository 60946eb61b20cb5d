"""A usage record as its tenant, or an admin, is shown it. Used by the record's route, its receipt and the command line.

What must always hold: a tenant sees a miss as its own client did (`miss_for_client`), and nothing of the hash chain,
whose numbers count what others have sent; no web framework is imported, which the report process would load first.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.ledger.exporting import values_of
from quipu.actors.ledger.fields import FIELD_NAMES
from quipu.actors.ledger.reading import LedgerRecord

from ..usage import miss_for_client

_TENANT_FIELDS = (*FIELD_NAMES, "recovered")


def shown_record(found: LedgerRecord, *, for_admin: bool) -> dict[str, Any]:
    """Return a record under the names of the ledger's exports, with the misses of all prompts."""
    misses = found.record.cache_misses
    if not for_admin:
        misses = tuple(map(miss_for_client, misses))
    values = values_of(attrs.evolve(found, record=attrs.evolve(found.record, cache_misses=misses)))
    shown: dict[str, Any] = values if for_admin else {name: values[name] for name in _TENANT_FIELDS}
    shown["cache_misses"] = [{"reason": miss.reason.value, "token": miss.token} for miss in misses]
    return shown
