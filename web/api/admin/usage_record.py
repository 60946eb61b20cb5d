"""`GET /v1/usage/{request_id}`, `…/receipt` and `GET /v1/usage/keys`: one record, and its receipt.

The id is from the response header `X-Quipu-Request-Id`. A tenant's key is shown its own records, an admin key all.

What must always hold: another tenant's record is answered like one that does not exist; a receipt says to everybody
what the record's tenant may see (`shown_record.py`, `receipts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from ...request.errors import APIError, not_found
from ...request.request_context import current_request_context
from ..operation import route
from .receipt_reports import ReceiptKeys, ReceiptReport
from .report_schemas import KEYS, RECEIPT, RECORD
from .reports import Report
from .shown_record import shown_record
from .usage_source import UsageSource, find_record, record_query


def install_usage_record(app: QuartTrio, source: UsageSource) -> None:
    """Register the routes."""

    @route(app, "GET /v1/usage/<request_id>", RECORD)
    async def usage_record(request_id: str) -> dict[str, Any]:
        principal = current_request_context().principal
        found = await find_record(source, request_id, principal)
        if found is None:
            raise _not_found()
        return {"object": "usage.record", **shown_record(found, for_admin=principal.is_admin)}

    @route(app, "GET /v1/usage/<request_id>/receipt", RECEIPT)
    async def usage_receipt(request_id: str) -> Response:
        query = record_query(request_id, current_request_context().principal)
        body = b"" if query is None else b"".join(await _report(ReceiptReport(query)))
        if not body:
            raise _not_found()
        return Response(body, content_type="application/json")

    @route(app, "GET /v1/usage/keys", KEYS)
    async def receipt_keys() -> Response:
        return Response(b"".join(await _report(ReceiptKeys())), content_type="application/json")

    async def _report(report: Report) -> Sequence[bytes]:
        return await source.report(report, current_request_context().principal.party)


def _not_found() -> APIError:
    return not_found("No usage record exists for this request id.", "request_id", "record_not_found")
