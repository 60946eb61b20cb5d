"""`GET /ui/usage`: usage by time, model, kind, key and tenant, with its cost, as the usage page shows and exports it.

    ?since=UNIX&until=UNIX&by=model&by=api_key&tenant=NAME&bucket=1h&format=json|csv

An admin, and on a server without keys the server's own machine, sees every tenant, or those of `tenant`; every other
key sees its own. The numbers are those of the usage reports (docs/operate/usage-reports.md).

What must always hold: no parameter can widen what a key sees; an answer has at most `MAX_BUCKETS` buckets.
"""

from __future__ import annotations

import time
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.ledger.reading import Query

from ..api.admin.organization_usage import check_order
from ..api.admin.prices import PriceList
from ..api.admin.usage_buckets import WIDTHS
from ..api.admin.usage_report import COUNTED
from ..api.admin.usage_source import UsageSource
from ..api.operation import route
from ..api.query import Parameters
from ..api.whole_response import whole_response
from ..request.errors import bad_value
from ..request.request_context import current_request_context
from .page_schemas import CSV, FORMATS, USAGE_TABLE
from .static_files import HEADERS
from .table_report import GROUPS, MAX_BUCKETS, TableReport, Wanted, pack_prices

DEFAULT_RANGE_S: Final = 86_400


def install_usage_table(app: QuartTrio, source: UsageSource, prices: PriceList | None) -> None:
    """Register the route. `web/auth/auth.py` decides who may use it."""
    packed = pack_prices(prices)

    @route(app, "GET /ui/usage", USAGE_TABLE)
    async def usage_table() -> Response:
        wanted = _read(Parameters(request.args), time.time())
        party = current_request_context().principal.party
        response = await whole_response(iter(await source.report(TableReport(wanted, packed), party)))
        response.content_type = CSV if wanted.is_csv else "application/json"
        response.headers.update({**HEADERS, "Cache-Control": "no-store"})
        return response


def _read(parameters: Parameters, now: float) -> Wanted:
    until = parameters.unix_time("until") or int(now) + 1
    since = parameters.unix_time("since")
    since = max(0, until - DEFAULT_RANGE_S) if since is None else since
    check_order(since, until, "since", "until")
    bucket = parameters.choice("bucket", WIDTHS, "") or None
    if bucket is not None and (until - since) / WIDTHS[bucket].width_s > MAX_BUCKETS:
        raise bad_value("bucket", f"too narrow for this range, which would have more than {MAX_BUCKETS} of them")
    principal = current_request_context().principal
    wanted = parameters.texts("tenant") or ()
    query = Query(
        since=since, until=until, tenants=wanted if principal.is_admin else (principal.tenant,), outcomes=COUNTED
    )
    by = parameters.choices("by", GROUPS) or ()
    return Wanted(query, by, bucket, is_csv=parameters.choice("format", FORMATS, "json") == "csv")
