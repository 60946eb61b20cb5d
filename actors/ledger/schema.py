"""The ledger's tables. Created and changed only by `migrations/`; a test checks that both agree.

`usage_records` has a typed column for every field of a record (named in `fields.py`), for its place in the chain and
for its position in the write-ahead file. Times are Unix seconds. An unknown count is NULL; `*_kind` says how a count is
known, and an `estimate` must never be billed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

HEAD: Final = "0007"
"""The version of the schema that this code reads and writes."""

metadata: Final = sa.MetaData()


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _seconds(name: str, *, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=nullable)


def _chain() -> list[sa.Column[str] | sa.Column[int]]:
    return [
        _text("server"),
        _number("number"),
        _text("hash"),
        _text("previous"),
        _text("entry"),
        _text("ledger"),
        _number("position"),
    ]


records: Final = sa.Table(
    "usage_records",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    _text("client_request_id", nullable=True),
    _text("idempotency_key", nullable=True),
    _text("idempotency_digest", nullable=True),
    _text("retry_of", nullable=True),
    _text("tenant"),
    _text("key_id", nullable=True),
    _text("model"),
    _text("endpoint"),
    _seconds("received_at"),
    _seconds("admitted_at", nullable=True),
    _seconds("first_token_at", nullable=True),
    _seconds("closed_at"),
    _text("outcome"),
    _text("finish_reason", nullable=True),
    _number("num_choices"),
    _number("prompt_tokens", nullable=True),
    _text("prompt_kind"),
    _number("cached_tokens", nullable=True),
    _text("cached_kind"),
    _number("cached_device_tokens", nullable=True),
    _number("cached_host_tokens", nullable=True),
    _number("cached_disk_tokens", nullable=True),
    _number("cached_remote_tokens", nullable=True),
    _number("cached_unattributed_tokens", nullable=True),
    _number("cache_write_tokens", nullable=True),
    _text("cache_write_kind"),
    _number("created_5m_tokens"),
    _number("created_1h_tokens"),
    _number("completion_tokens"),
    _number("reasoning_tokens"),
    _number("computed_tokens"),
    _number("restored_tokens"),
    _number("recomputed_tokens"),
    sa.Column("disputed", sa.Boolean, nullable=False),
    _text("miss_reason", nullable=True),
    _number("miss_token", nullable=True),
    _text("cache_misses"),
    _number("engine", nullable=True),
    _number("engine_incarnation", nullable=True),
    sa.Column("engine_deaths", sa.BigInteger, nullable=False, server_default="0"),
    _number("router_estimate_tokens", nullable=True),
    _number("seed", nullable=True),
    _text("fault", nullable=True),
    sa.Column("completion_kind", sa.Text, nullable=False, server_default="known"),
    _text("upstream_usage", nullable=True),
    sa.Column("recovered", sa.Boolean, nullable=False),
    *_chain(),
    sa.Index("usage_records_closed", "closed_at", "request_id"),
    sa.Index("usage_records_tenant_closed", "tenant", "closed_at"),
    sa.Index("usage_records_digest", "idempotency_digest", "admitted_at"),
    sa.Index("usage_records_chain", "server", "number", unique=True),
)

marks: Final = sa.Table(
    "ledger_marks",
    metadata,
    sa.Column("server", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("kind"),
    _text("hash"),
    _text("previous"),
    _text("entry"),
    _text("ledger"),
    _number("position"),
    _seconds("at"),
)
"""Chained entries other than records: starts, stops, and repeated closings of a request."""

sources: Final = sa.Table(
    "ledger_sources",
    metadata,
    sa.Column("ledger", sa.Text, primary_key=True),
    _number("position"),
    _seconds("retained_since", nullable=True),
    _seconds("retention_clock", nullable=True),
)
"""One row per data directory: everything before `position` of its write-ahead file is in this database, records closed
before `retained_since` may have been deleted (NULL: none have), and `retention_clock` is what retention last took for
the time (NULL: it has not looked)."""
