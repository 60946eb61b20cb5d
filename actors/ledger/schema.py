"""The ledger's tables. Created and changed only by `migrations/`; a test checks that both agree.

`usage_records` has a typed column for every field of a record (named in `fields.py`), for its place in the chain and
for its position in the write-ahead file. Times are Unix seconds. An unknown count is NULL; `*_kind` says how a count is
known, and an `estimate` must never be billed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from .fields import TIERS

HEAD: Final = "0013"
"""The version of the schema that this code reads and writes."""

metadata: Final = sa.MetaData()


def _texts(*names: str, nullable: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names]


def _numbers(*names: str, nullable: bool = False) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=nullable) for name in names]


def _seconds(*names: str, nullable: bool = False) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double, nullable=nullable) for name in names]


records: Final = sa.Table(
    "usage_records",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    *_texts("client_request_id", "idempotency_key", "idempotency_digest", "retry_of", nullable=True),
    *_texts("tenant"),
    *_texts("key_id", nullable=True),
    *_texts("model", "endpoint"),
    *_seconds("received_at"),
    *_seconds("admitted_at", "first_token_at", nullable=True),
    *_seconds("closed_at"),
    *_texts("outcome"),
    *_texts("finish_reason", nullable=True),
    *_numbers("num_choices"),
    *_numbers("prompt_tokens", "cached_tokens", "cache_write_tokens", nullable=True),
    *_numbers(*(f"cached_{tier}_tokens" for tier in TIERS), nullable=True),
    *_texts("prompt_kind", "cached_kind", "cache_write_kind"),
    *_numbers("created_5m_tokens", "created_1h_tokens", "completion_tokens", "reasoning_tokens"),
    *_numbers("computed_tokens", "restored_tokens", "recomputed_tokens"),
    sa.Column("disputed", sa.Boolean, nullable=False),
    *_texts("miss_reason", nullable=True),
    *_numbers("miss_token", nullable=True),
    *_texts("cache_misses"),
    *_numbers("engine", "engine_incarnation", "router_estimate_tokens", "seed", nullable=True),
    *_numbers("decode_engine", "decode_incarnation", nullable=True),
    sa.Column("engine_deaths", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("moved_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("moved_by_engine", sa.Text, nullable=False, server_default=""),
    *(
        sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        for name in (
            "draft_tokens",
            "accepted_draft_tokens",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        )
    ),
    *_texts("fault", "upstream_usage", "adapter", "parent", "batch_id", nullable=True),
    sa.Column("completion_kind", sa.Text, nullable=False, server_default="known"),
    sa.Column("kind", sa.Text, nullable=False, server_default="generate"),
    sa.Column("recovered", sa.Boolean, nullable=False),
    *_texts("server", "hash", "previous", "entry", "ledger"),
    *_numbers("number", "position"),
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
    *_texts("kind", "hash", "previous", "entry", "ledger"),
    *_numbers("position"),
    *_seconds("at"),
)
"""Chained entries other than records: starts, stops, and repeated closings of a request."""

sources: Final = sa.Table(
    "ledger_sources",
    metadata,
    sa.Column("ledger", sa.Text, primary_key=True),
    *_numbers("position"),
    *_seconds("retained_since", "retention_clock", nullable=True),
)
"""One row per data directory: everything before `position` of its write-ahead file is in this database, records closed
before `retained_since` may have been deleted (NULL: none have), and `retention_clock` is what retention last took for
the time (NULL: it has not looked)."""
