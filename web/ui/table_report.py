"""The body of `GET /ui/usage`, JSON or CSV, made from the ledger. `usage_table.py` reads what a client asks for.

What must always hold: a table has at most `MAX_LINES` lines, and costs little more than that to refuse.
"""

from __future__ import annotations

import csv
import io
import pickle
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import attrs
import orjson

from quipu.actors.ledger.fields import TIERS
from quipu.actors.ledger.reading import GroupColumn, LedgerRecord, Query

from ..api.admin.cost_report import CostLine, columns, price_parts, split, total
from ..api.admin.prices import PriceList
from ..api.admin.reports import Ledger, ReportRefused
from ..api.admin.usage_buckets import WIDTHS

GROUPS: Final[dict[str, GroupColumn]] = {"model": "model", "kind": "kind", "api_key": "key_id", "tenant": "tenant"}
MAX_BUCKETS: Final = 1000
MAX_LINES: Final = 5000
MAX_DISPUTED: Final = 50
_BY_TIER: Final = tuple(f"cached_{tier}_tokens" for tier in TIERS)
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet would compute."""


@attrs.frozen
class Wanted:
    query: Query
    by: tuple[str, ...]
    bucket: str | None
    is_csv: bool

    @property
    def columns(self) -> list[GroupColumn]:
        """The ledger's columns to group by: with the model, also an adapter's parent."""
        return [GROUPS[name] for name in self.by] + (["parent"] if "model" in self.by else [])


def pack_prices(prices: PriceList | None) -> bytes:
    """Return a price list as a TableReport has it: packed once, since it may be large."""
    return pickle.dumps(prices, pickle.HIGHEST_PROTOCOL)


@attrs.frozen
class TableReport:
    wanted: Wanted
    packed_prices: bytes

    def make(self, ledger: Ledger) -> bytes:
        wanted = self.wanted
        prices: PriceList | None = pickle.loads(self.packed_prices)  # noqa: S301 - packed by `pack_prices` alone
        width_s = None if wanted.bucket is None else WIDTHS[wanted.bucket].width_s
        by = columns(wanted.columns, prices)
        parts = [(query, ledger.sums(query, group_by=by, bucket_s=width_s)) for query in split(wanted.query, prices)]
        keys = {(one.bucket, *(one.group[name] for name in wanted.columns)) for _, sums in parts for one in sums}
        if len(keys) > MAX_LINES:
            message = f"The answer would have {len(keys)} rows; at most {MAX_LINES} are shown. Choose a wider `bucket`."
            raise ReportRefused(message, "bucket", "too_many_rows")
        lines = price_parts(parts, wanted.columns, prices)
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
            "disputed": [_describe_disputed(found) for found in _disputed(ledger, wanted.query)],
            "has_prices": prices is not None,
        }
        return orjson.dumps(answer)


def _disputed(ledger: Ledger, query: Query) -> list[LedgerRecord]:
    only = attrs.evolve(query, disputed_only=True)
    return list(islice(ledger.records(only, newest_first=True), MAX_DISPUTED))


def _describe(line: CostLine, by: Sequence[str]) -> dict[str, Any]:
    one = line.sum
    return {
        "start": one.bucket,
        **{name: one.group[GROUPS[name]] for name in by},
        **({"parent": one.group["parent"]} if "model" in by else {}),
        "requests": one.num_requests,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        **{name: getattr(one, name) for name in _BY_TIER},
        "cache_write_tokens": one.cache_write_tokens,
        "completion_tokens": one.completion_tokens,
        "reasoning_tokens": one.reasoning_tokens,
        "queried_tokens": one.queried_tokens,
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
        "parent": record.parent,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
    }


def _as_csv(rows: Sequence[dict[str, Any]], whole: dict[str, Any], by: Sequence[str]) -> bytes:
    """Return the rows with a column for each currency, without a total, which a sum would count twice."""
    currencies = list(whole["cost"])
    names = [name for name in whole if name not in ("start", "cost", "unpriced_models")]
    file = io.StringIO()
    writer = csv.writer(file)
    by = [*by, "parent"] if "model" in by else by
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
