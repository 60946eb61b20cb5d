"""Queries of the ledger: filters, groups and sums, on records in memory and as SQL. Used by `reading.py`.

What must always hold: both ways give the same result; a sum of counted tokens contains no estimates; a request that the
server itself failed counts as one request and no tokens, except when the ledger is reconciled with the counters; a
count larger than possible, which earlier versions accepted from upstreams, is in no sum, so that no sum overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs
import sqlalchemy as sa

from ..messages.counts import MAX_COUNT, Estimate, Known
from ..messages.outcomes import Outcome
from ..messages.usage_record import ServiceTier, UsageRecord
from .fields import TIERS
from .schema import records

GroupColumn = Literal["tenant", "key_id", "model", "parent", "endpoint", "outcome", "kind", "service_tier"]


@attrs.frozen
class Query:
    """Selects records. An empty tuple is no condition."""

    since: float | None = None
    """Unix seconds: closed at that time or later."""
    until: float | None = None
    """Unix seconds: closed before that time."""
    request_ids: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    kinds: tuple[str, ...] = ()
    service_tiers: tuple[ServiceTier, ...] = ()
    idempotency_digests: tuple[str, ...] = ()
    disputed_only: bool = False

    def _named(self) -> dict[str, list[str]]:
        """Return the values of which a record has to have one, by field."""
        named = {
            "request_id": self.request_ids,
            "tenant": self.tenants,
            "key_id": self.key_ids,
            "model": self.models,
            "endpoint": self.endpoints,
            "outcome": tuple(outcome.value for outcome in self.outcomes),
            "kind": self.kinds,
            "service_tier": tuple(tier.value for tier in self.service_tiers),
            "idempotency_digest": self.idempotency_digests,
        }
        return {name: list(values) for name, values in named.items() if values}

    def matches(self, record: UsageRecord) -> bool:
        return (
            (self.since is None or record.closed_at >= self.since)
            and (self.until is None or record.closed_at < self.until)
            and all(getattr(record, name) in values for name, values in self._named().items())
            and (record.disputed or not self.disputed_only)
        )

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        c = records.c
        wanted: list[sa.ColumnElement[bool]] = [_column(name).in_(values) for name, values in self._named().items()]
        if self.since is not None:
            wanted.append(c.closed_at >= self.since)
        if self.until is not None:
            wanted.append(c.closed_at < self.until)
        if self.disputed_only:
            wanted.append(c.disputed)
        return wanted


@attrs.define
class Sum:
    """The sums of one group in one bucket. Estimated tokens are summed separately and never billed."""

    bucket: float | None = None
    """Start of the bucket in Unix seconds. None: there are no buckets."""
    group: dict[GroupColumn, str | None] = attrs.field(factory=dict)
    num_requests: int = 0
    num_admitted: int = 0
    """Requests that an engine admitted. The others were rejected or left while queued."""
    num_disputed: int = 0
    num_faulted: int = 0
    """Requests that the server itself failed, which count no tokens."""
    prompt_tokens: int = 0
    queried_tokens: int = 0
    """Prompt tokens with a known number of cached ones: the denominator of hit rates."""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    cached_remote_tokens: int = 0
    cached_unattributed_tokens: int = 0
    created_5m_tokens: int = 0
    created_1h_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    computed_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    moved_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    estimated_prompt_tokens: int = 0
    estimated_cached_tokens: int = 0
    estimated_cache_write_tokens: int = 0


_PLAIN: Final = (
    "created_5m_tokens",
    "created_1h_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "computed_tokens",
    "restored_tokens",
    "recomputed_tokens",
    "moved_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
)
_COUNTS: Final = ("prompt", "cached", "cache_write")
_REQUESTS: Final = ("num_requests", "num_admitted", "num_disputed")
_TOKENS: Final = tuple(field.name for field in attrs.fields(Sum) if field.name.endswith("_tokens"))


def is_faulted(table: sa.FromClause = records) -> sa.ColumnElement[bool]:
    """Whether the server itself failed a row's request. Records from before schema 0003 have only `recovered`."""
    return sa.or_(table.c.fault.is_not(None), table.c.recovered)


def select_sums(group_by: tuple[GroupColumn, ...], bucket_s: int | None, dialect: str) -> sa.Select[Any]:
    """Select the rows that `SumBuilder.add_row` adds up; requests that the server failed are in rows of their own."""
    c = records.c

    def total(value: Any) -> sa.ColumnElement[int]:
        # PostgreSQL's sum of bigints is a numeric
        return sa.cast(sa.func.coalesce(sa.func.sum(value), 0), sa.BigInteger)

    def where(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return total(sa.case((condition, 1), else_=0))

    columns: dict[str, sa.ColumnElement[Any]] = {
        "num_requests": sa.func.count(),
        "num_admitted": where(c.admitted_at.is_not(None)),
        "num_disputed": where(c.disputed),
    }
    columns |= {name: total(sa.case((_can_be(c[name]), c[name]), else_=0)) for name in _PLAIN}
    columns |= {f"cached_{tier}_tokens": total(_of_kind("cached", "known", f"cached_{tier}_tokens")) for tier in TIERS}
    for name in _COUNTS:
        columns[f"{name}_tokens"] = total(_of_kind(name, "known", f"{name}_tokens"))
        columns[f"estimated_{name}_tokens"] = total(_of_kind(name, "estimate", f"{name}_tokens"))
    is_queried = sa.and_(c.prompt_kind == "known", c.cached_kind == "known", _can_be(c.prompt_tokens))
    columns["queried_tokens"] = total(sa.case((is_queried, c.prompt_tokens), else_=0))
    groups: list[sa.ColumnElement[Any]] = [
        is_faulted().label("is_faulted"),
        *(_column(name).label(name) for name in group_by),
    ]
    if bucket_s is not None:
        quotient = c.closed_at / bucket_s
        # SQLite may lack floor(); its cast truncates, PostgreSQL's rounds
        whole = sa.func.floor(quotient) if dialect == "postgresql" else quotient
        groups.append((sa.cast(whole, sa.BigInteger) * bucket_s).label("bucket"))
    labelled = [column.label(name) for name, column in columns.items()]
    return sa.select(*labelled, *groups).group_by(*groups)


def _column(name: str) -> sa.ColumnElement[Any]:
    if name == "service_tier":
        is_batch = records.c.batch_id.is_not(None)
        return sa.case((is_batch, ServiceTier.BATCH), else_=ServiceTier.STANDARD)
    return records.c[name]


def _of_kind(count: str, kind: str, name: str) -> sa.ColumnElement[int]:
    column = records.c[name]
    return sa.case((sa.and_(records.c[f"{count}_kind"] == kind, _can_be(column)), column), else_=0)


def _can_be(column: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    return column <= MAX_COUNT


class SumBuilder:
    """Adds up records, and rows of `select_sums`, by bucket and group.

    `as_booked`: include the tokens of requests that the server itself failed, which reports do not count.
    """

    def __init__(self, group_by: tuple[GroupColumn, ...], bucket_s: int | None, *, as_booked: bool = False) -> None:
        self._group_by = group_by
        self._bucket_s = bucket_s
        self._as_booked = as_booked
        self._sums: dict[tuple[object, ...], Sum] = {}

    def add_record(self, record: UsageRecord) -> None:
        bucket = None if self._bucket_s is None else math.floor(record.closed_at / self._bucket_s) * self._bucket_s
        into = self._sum(bucket, {name: getattr(record, name) for name in self._group_by})
        into.num_requests += 1
        into.num_admitted += record.admitted_at is not None
        into.num_disputed += record.disputed
        if record.fault is not None:
            into.num_faulted += 1
            if not self._as_booked:
                return
        for name in _PLAIN:
            _increase(into, name, getattr(record, name))
        for name in _COUNTS:
            match getattr(record, name):
                case Known(n):
                    _increase(into, f"{name}_tokens", n)
                case Estimate(n):
                    _increase(into, f"estimated_{name}_tokens", n)
        if isinstance(record.cached, Known):
            if isinstance(record.prompt, Known):
                _increase(into, "queried_tokens", record.prompt.n)
            for tier, number in (record.cached_by_tier or {}).items():
                _increase(into, f"cached_{tier if tier in TIERS else 'unattributed'}_tokens", number)

    def add_row(self, row: Mapping[str, Any]) -> None:
        bucket = None if self._bucket_s is None else float(row["bucket"])
        into = self._sum(bucket, {name: row[name] for name in self._group_by})
        if row["is_faulted"]:
            into.num_faulted += int(row["num_requests"])
        counts_tokens = self._as_booked or not row["is_faulted"]
        for name in (*_REQUESTS, *(_TOKENS if counts_tokens else ())):
            setattr(into, name, getattr(into, name) + int(row[name]))

    def sums(self) -> list[Sum]:
        """Return the sums, sorted by bucket, then by group."""
        if not self._group_by and self._bucket_s is None:
            self._sum(None, {})

        def key(item: Sum) -> tuple[object, ...]:
            return item.bucket or 0.0, *((value is not None, value or "") for value in item.group.values())

        return sorted(self._sums.values(), key=key)

    def _sum(self, bucket: float | None, group: dict[GroupColumn, str | None]) -> Sum:
        key = (bucket, *group.values())
        if key not in self._sums:
            self._sums[key] = Sum(bucket=bucket, group=group)
        return self._sums[key]


def _increase(into: Sum, name: str, number: int) -> None:
    if number <= MAX_COUNT:
        setattr(into, name, getattr(into, name) + number)
