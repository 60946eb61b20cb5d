"""`quipu usage`: usage by model, key, tenant, endpoint, outcome or kind, as a table or as JSON.

Reads a data directory, a database, or both, like `quipu ledger`, and counts like the reports over HTTP
(`web/api/admin/usage_report.py`). The result goes to stdout; errors go to stderr, with exit code 2.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson
from sqlalchemy.exc import SQLAlchemyError

from quipu.actors.ledger.database import LedgerError, reason
from quipu.actors.ledger.reading import GroupColumn, Query, open_reader

from ..api.admin.cost_report import NUMBERS, CostLine, columns, price_parts, split, total
from ..api.admin.prices import PriceError, read_prices
from ..api.admin.usage_buckets import WIDTHS
from ..api.admin.usage_report import COUNTED, RETRIES
from ..api.query import LATEST
from .command_output import complain, print_result, printable
from .command_progress import command_progress
from .ledger import moment
from .ledger_flags import add_place_flags, ledger_place
from .one_line_parser import OneLineParser

GROUPS: Final[Mapping[str, GroupColumn]] = {
    "model": "model",
    "api_key": "key_id",
    "tenant": "tenant",
    "endpoint": "endpoint",
    "outcome": "outcome",
    "kind": "kind",
}
_NUMBERS: Final = ("requests", "input", "cached", "hit rate", "written", "output")
_BY_TIER: Final = {"host": "from host", "disk": "from disk", "remote": "from remote"}
"""Columns after `cached` for the tiers that tokens were loaded from."""


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `usage`. Returns the exit code."""
    return run_usage(make_parser().parse_args(argv), os.environ)


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu usage", description="Show usage by model, key or tenant.")
    add = parser.add_argument
    add(
        "--since",
        type=_moment,
        default="24h",
        metavar="TIME",
        help="only requests that ended since then: 24h, 7d (ago), or ISO 8601",
    )
    add("--until", type=_moment, metavar="TIME", help="only requests that ended before then, in the same formats")
    add(
        "--by", type=_groups, default=(), metavar="NAMES", help=f"a line for each, comma-separated: {', '.join(GROUPS)}"
    )
    add("--bucket", choices=list(WIDTHS), help="a line for each minute, hour or day (UTC)")
    add("--retries", choices=RETRIES, default="count", help="`collapse`: a request and its retries count once")
    add("--tenant", action="append", default=[], metavar="NAME", help="only this tenant; may be repeated")
    add("--prices", type=Path, metavar="FILE", help="prices of tokens: adds what they cost")
    add_place_flags(add)
    add("--json", action="store_true", help="print JSON")
    return parser


def run_usage(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `quipu usage`; return the exit code."""
    by: tuple[str, ...] = arguments.by
    query = Query(
        since=arguments.since,
        until=arguments.until,
        tenants=tuple(arguments.tenant),
        outcomes=() if "outcome" in by else COUNTED,
    )
    group_by = [GROUPS[name] for name in by]
    bucket_s = None if arguments.bucket is None else WIDTHS[arguments.bucket].width_s
    collapses = arguments.retries == "collapse"
    try:
        if arguments.until is not None and arguments.until <= arguments.since:
            raise LedgerError("--until must be later than --since")
        working = command_progress("adding up", is_off=arguments.json)
        with working, open_reader(**ledger_place(arguments, environment)) as reader:
            prices = None if arguments.prices is None else read_prices(arguments.prices)
            grouped = columns(group_by, prices)
            parts = [
                (part, reader.sums(part, group_by=grouped, bucket_s=bucket_s, collapse_retries=collapses))
                for part in split(query, prices)
            ]
            lines = price_parts(parts, group_by, prices)
    except (LedgerError, PriceError, SQLAlchemyError, OSError) as error:
        return complain(reason(error))
    if arguments.json:
        rows = _rows(lines, by, has_prices=prices is not None)
        return print_result(orjson.dumps({"since": query.since, "until": query.until, "rows": rows}).decode())
    return print_result("\n".join(_table(lines, by, with_bucket=bucket_s is not None)))


def _rows(lines: Sequence[CostLine], by: Sequence[str], *, has_prices: bool) -> list[dict[str, object]]:
    """Return every sum under the ledger's names, with prices also its cost by currency."""
    rows = []
    for line in lines:
        groups = {name: line.sum.group[GROUPS[name]] for name in by}
        numbers = {name: getattr(line.sum, name) for name in NUMBERS}
        cost = {"cost": line.cost, "unpriced_models": line.unpriced_models} if has_prices else {}
        rows.append({"bucket": line.sum.bucket, **groups, **numbers, **cost})
    return rows


def _table(lines: Sequence[CostLine], by: Sequence[str], *, with_bucket: bool) -> Iterator[str]:
    named = [*(["from"] if with_bucket else []), *by]
    whole = total(lines)
    currencies = sorted(whole.amounts)
    tiers = [tier for tier in _BY_TIER if _loaded(whole, tier)]
    titles = [*_NUMBERS[:3], *(_BY_TIER[tier] for tier in tiers), *_NUMBERS[3:]]
    table = [[*named, *titles, *map(printable, currencies)]]
    for line in lines:
        start = [_time(line.sum.bucket)] if line.sum.bucket is not None else []
        names = [line.sum.group[GROUPS[name]] for name in by]
        shown = ["-" if name is None else printable(name) for name in names]
        table.append([*start, *shown, *_numbers(line, tiers, currencies)])
    if len(lines) != 1:
        table.append([*["total", *[""] * len(named)][: len(named)], *_numbers(whole, tiers, currencies)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if place < len(named) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    if num_estimated := whole.sum.estimated_cached_tokens:
        yield f"({num_estimated:,} tokens more were estimated to be cached: not billed as cached)"
    if num_unknown := whole.sum.prompt_tokens - whole.sum.queried_tokens:
        yield f"(of {num_unknown:,} input tokens it is not known how many were cached: they are in no hit rate)"
    if num_faulted := whole.sum.num_faulted:
        yield f"({num_faulted:,} of the requests failed through the server's own fault: their tokens do not count)"
    if whole.unpriced_models:
        yield f"(no price, and so no cost: {', '.join(map(printable, whole.unpriced_models))})"


def _loaded(line: CostLine, tier: str) -> int:
    return {
        "host": line.sum.cached_host_tokens,
        "disk": line.sum.cached_disk_tokens,
        "remote": line.sum.cached_remote_tokens,
    }[tier]


def _numbers(line: CostLine, tiers: Sequence[str], currencies: Sequence[str]) -> list[str]:
    one = line.sum
    rate = f"{one.cached_tokens / one.queried_tokens:.1%}" if one.queried_tokens else "-"
    counts = (one.num_requests, one.prompt_tokens, one.cached_tokens, one.cache_write_tokens, one.completion_tokens)
    requests, prompt, cached, written, output = (f"{count:,}" for count in counts)
    by_tier = [f"{_loaded(line, tier):,}" for tier in tiers]
    costs = [line.cost.get(currency, "-") for currency in currencies]
    return [requests, prompt, cached, *by_tier, rate, written, output, *costs]


def _time(bucket: float) -> str:
    return datetime.fromtimestamp(bucket, UTC).strftime("%Y-%m-%d %H:%MZ")


def _moment(text: str) -> float:
    seconds = moment(text)
    if not (math.isfinite(seconds) and 0 <= seconds <= LATEST):
        raise argparse.ArgumentTypeError(f"{text!r} is not between the years 1970 and 9999")
    return seconds


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"unknown group {name!r} (one of {', '.join(GROUPS)})")
    return names
