"""Usage records as CloudEvents (version 1.0, JSON), as metering systems such as OpenMeter take them. Pure.

    id       the request id: with `source` unique, so that an event that comes twice is counted once
    source   urn:quipu:ledger:LEDGER
    subject  the tenant
    time     when the record was closed
    data     `counted`: the tokens as reports count them; `record`: the record as the ledger has it

What must always hold: the sum of `counted` over all events is what a report over the same records says.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import attrs
import orjson

from .exporting import values_of
from .queries import Sum, SumBuilder
from .reading import LedgerRecord

EVENT_TYPE: Final = "quipu.usage"
CONTENT_TYPE: Final = "application/cloudevents+json; charset=utf-8"
_LABELS: Final = ("model", "parent", "key_id", "endpoint", "kind", "outcome", "fault")
"""Fields that meters group by, so that they need not look into `record`."""
_COUNTED: Final = tuple(
    field.name for field in attrs.fields(Sum) if field.name == "num_requests" or field.name.endswith("_tokens")
)


def cloud_event(found: LedgerRecord, ledger: str) -> bytes:
    """Return the event of a record of a ledger, as JSON."""
    record = found.record
    builder = SumBuilder((), None)
    builder.add_record(record)
    (counted,) = builder.sums()
    values = values_of(found)
    data: dict[str, Any] = {name: values[name] for name in _LABELS}
    data["counted"] = {name: getattr(counted, name) for name in _COUNTED}
    data["record"] = values
    event = {
        "specversion": "1.0",
        "id": record.request_id,
        "source": f"urn:quipu:ledger:{ledger}",
        "type": EVENT_TYPE,
        "subject": record.tenant,
        "time": _rfc3339(record.closed_at),
        "datacontenttype": "application/json",
        "data": data,
    }
    return orjson.dumps(event)


def _rfc3339(seconds: float) -> str:
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # of a clock that was wrong
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
