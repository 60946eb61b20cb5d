"""`GET /v1/cache/explain/{request_id}`: what of a request's prompts was cached, why not more, and what could change it.

The id is from the response header `X-Quipu-Request-Id`. A tenant's key is shown its own requests, an admin key all. The
last requests are explained from memory, older ones from their usage records, without blocks, messages and advice.

What must always hold: another tenant's request is answered like one that does not exist, after the same work; no answer
names another tenant's request.
"""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from quipu.actors.accountant.explaining import explain_record
from quipu.actors.request_desk.interface import Desk

from ...http.turns import FairTurns, TooManyWaiting, turn
from ...request.errors import not_found, unavailable
from ...request.request_context import current_request_context
from ..admin.usage_source import UsageSource, find_record
from ..operation import route
from ..whole_response import whole_response
from .cache_schemas import EXPLAIN
from .explanation_json import Reader, explanation_pieces

MAX_WAITING = 32
"""Of one tenant."""


def install_explain(app: QuartTrio, desk: Desk, usage: UsageSource | None) -> None:
    """Register the route. Without a source of usage records only the last requests are explained."""
    # one at a time, so that they leave room for usage reports, which are read by the same process
    reading = FairTurns(max_waiting=MAX_WAITING)

    @route(app, "GET /v1/cache/explain/<request_id>", EXPLAIN)
    async def explain(request_id: str) -> Response:
        principal = current_request_context().principal
        tenant = None if principal.is_admin else principal.tenant
        async with turn():
            found = desk.explain(request_id, tenant)
        if found is None and usage is not None:
            try:
                async with reading.turn(principal.party):
                    record = await find_record(usage, request_id, principal)
            except TooManyWaiting:
                raise unavailable(
                    "Too many explanations are being read. Try again later.", "too_many_reports"
                ) from None
            found = None if record is None else explain_record(record.record)
        if found is None:
            raise not_found("No record exists for this request id.", "request_id", "record_not_found")
        return await whole_response(explanation_pieces(found, Reader(tenant), desk.info.block_size))
