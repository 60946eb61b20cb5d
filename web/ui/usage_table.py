"""`GET /ui/usage`: usage by time, model, key and tenant, with its cost, as the usage page shows and exports it.

    ?since=UNIX&until=UNIX&by=model&by=api_key&bucket=1h&format=json|csv

An admin, and on a server without keys the server's own machine, sees every tenant; every other key sees its own. The
numbers are those of the usage reports (docs/usage-reports.md).

What must always hold: no parameter can widen what a key sees; an answer has at most `MAX_BUCKETS` buckets and
`MAX_LINES` lines; it is made in a thread.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import attrs
import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.ledger.reading import GroupColumn, LedgerRecord, Query, Sum

from ..api.admin.cost_report import CostLine, columns, price_parts, split, total
from ..api.admin.prices import PriceList
from ..api.admin.usage_buckets import WIDTHS, check_order
from ..api.admin.usage_params import Parameters
from ..api.admin.usage_report import COUNTED
from ..api.admin.usage_source import UsageSource
from ..request.errors import APIError, bad_value, invalid
from ..request.request_context import current_request_context
from .static_files import HEADERS

GROUPS: Final[dict[str, GroupColumn]] = {"model": "model", "api_key": "key_id", "tenant": "tenant"}
FORMATS: Final = ("json", "csv")
DEFAULT_RANGE_S: Final = 86_400
MAX_BUCKETS: Final = 1000
MAX_LINES: Final = 5000
MAX_DISPUTED: Final = 50
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet would compute."""


@attrs.frozen
class Wanted:
    """What a request asks for."""

    query: Query
    by: tuple[str, ...]
    bucket: str | None
    is_csv: bool

    @property
    def columns(self) -> list[GroupColumn]:
        return [GROUPS[name] for name in self.by]


def install_usage_table(app: QuartTrio, source: UsageSource, prices: PriceList | None) -> None:
    """Register the route. `web/auth/auth.py` decides who may use it."""

    @app.get("/ui/usage")
    async def usage_table() -> Response:
        wanted = _read(Parameters(request.args), time.time())
        width_s = None if wanted.bucket is None else WIDTHS[wanted.bucket].width_s
        by = columns(wanted.columns, prices)
        parts = [(query, await source.sums(query, by, width_s)) for query in split(wanted.query, prices)]
        disputed = () if wanted.is_csv else await source.disputed(wanted.query, MAX_DISPUTED)
        body = await trio.to_thread.run_sync(partial(_render, wanted, parts, prices, disputed))
        content_type = "text/csv; charset=utf-8" if wanted.is_csv else "application/json"
        response = Response(body, content_type=content_type)
        response.headers.update({**HEADERS, "Cache-Control": "no-store"})
        return response


def _read(parameters: Parameters, now: float) -> Wanted:
    """Return what the parameters of the current request ask for. Raises APIError."""
    until = parameters.unix_time("until") or int(now) + 1
    since = parameters.unix_time("since")
    since = max(0, until - DEFAULT_RANGE_S) if since is None else since
    if wrong := check_order(since, until, "since", "until"):
        raise wrong
    bucket = parameters.choice("bucket", WIDTHS, "") or None
    if bucket is not None and (until - since) / WIDTHS[bucket].width_s > MAX_BUCKETS:
        raise bad_value("bucket", f"too narrow for this range, which would have more than {MAX_BUCKETS} of them")
    principal = current_request_context().principal
    query = Query(since=since, until=until, tenants=() if principal.is_admin else (principal.tenant,), outcomes=COUNTED)
    by = parameters.choices("by", GROUPS) or ()
    return Wanted(query, by, bucket, is_csv=parameters.choice("format", FORMATS, "json") == "csv")


def _render(
    wanted: Wanted,
    parts: Sequence[tuple[Query, Sequence[Sum]]],
    prices: PriceList | None,
    disputed: Sequence[LedgerRecord],
) -> bytes:
    """Return the body. Raises APIError."""
    lines = price_parts(parts, wanted.columns, prices)
    if len(lines) > MAX_LINES:
        raise _too_many(len(lines))
    described = [_describe(line, wanted.by) for line in lines]
    whole = _describe(total(lines), ())
    if wanted.is_csv:
        return _as_csv(described, whole, wanted.by)
    answer = {
        "object": "ui.usage",
        "since": wanted.query.since,
        "until": wanted.query.until,
        "bucket": wanted.bucket,
        "by": wanted.by,
        "rows": described,
        "total": whole | {"start": None},
        "disputed": [_describe_disputed(found) for found in disputed],
        "has_prices": prices is not None,
    }
    return orjson.dumps(answer)


def _too_many(num_lines: int) -> APIError:
    message = f"The answer would have {num_lines} rows; at most {MAX_LINES} are shown. Choose a wider `bucket`."
    return invalid(message, "bucket", "too_many_rows")


def _describe(line: CostLine, by: Sequence[str]) -> dict[str, Any]:
    one = line.sum
    return {
        "start": one.bucket,
        **{name: one.group[GROUPS[name]] for name in by},
        "requests": one.num_requests,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "cache_write_tokens": one.cache_write_tokens,
        "completion_tokens": one.completion_tokens,
        "reasoning_tokens": one.reasoning_tokens,
        "disputed": one.num_disputed,
        "faulted": one.num_faulted,
        "cost": line.cost,
        "unpriced_models": line.unpriced_models,
    }


def _describe_disputed(found: LedgerRecord) -> dict[str, Any]:
    record = found.record
    return {
        "request_id": record.request_id,
        "closed_at": record.closed_at,
        "tenant": record.tenant,
        "api_key": record.key_id,
        "model": record.model,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
    }


def _as_csv(rows: Sequence[dict[str, Any]], whole: dict[str, Any], by: Sequence[str]) -> bytes:
    """Return the rows with a column for each currency. There is no total: whoever adds up would count it twice."""
    currencies = list(whole["cost"])
    names = [name for name in whole if name not in ("start", "cost", "unpriced_models")]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["start", *by, *names, *(_cell(f"cost_{currency}") for currency in currencies)])
    for row in rows:
        start = "" if row["start"] is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row["start"]))
        groups = [_cell(row[name]) for name in by]
        costs = [row["cost"].get(currency, "") for currency in currencies]
        writer.writerow([start, *groups, *(row[name] for name in names), *costs])
    return file.getvalue().encode()


def _cell(value: str | None) -> str:
    """Return a name as a cell that no spreadsheet computes."""
    text = value or ""
    return f"'{text}" if text.startswith(_FORMULA) else text
