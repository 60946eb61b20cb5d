"""The first version: records, marks, sources."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "usage_records",
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
        *_numbers("prompt_tokens", nullable=True),
        *_texts("prompt_kind"),
        *_numbers("cached_tokens", nullable=True),
        *_texts("cached_kind"),
        *_numbers("cached_device_tokens", "cached_host_tokens", "cached_disk_tokens", nullable=True),
        *_numbers("cached_remote_tokens", "cached_unattributed_tokens", "cache_write_tokens", nullable=True),
        *_texts("cache_write_kind"),
        *_numbers("created_5m_tokens", "created_1h_tokens", "completion_tokens", "reasoning_tokens"),
        *_numbers("computed_tokens", "restored_tokens", "recomputed_tokens"),
        sa.Column("disputed", sa.Boolean, nullable=False),
        *_texts("miss_reason", nullable=True),
        *_numbers("miss_token", nullable=True),
        *_texts("cache_misses"),
        *_numbers("engine_incarnation", nullable=True),
        sa.Column("recovered", sa.Boolean, nullable=False),
        *_texts("server"),
        *_numbers("number"),
        *_texts("hash", "previous", "entry", "ledger"),
        *_numbers("position"),
    )
    op.create_index("usage_records_closed", "usage_records", ["closed_at", "request_id"])
    op.create_index("usage_records_tenant_closed", "usage_records", ["tenant", "closed_at"])
    op.create_index("usage_records_digest", "usage_records", ["idempotency_digest", "admitted_at"])
    op.create_index("usage_records_chain", "usage_records", ["server", "number"], unique=True)
    op.create_table(
        "ledger_marks",
        sa.Column("server", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        *_texts("kind", "hash", "previous", "entry", "ledger"),
        *_numbers("position"),
        *_seconds("at"),
    )
    op.create_table(
        "ledger_sources",
        sa.Column("ledger", sa.Text, primary_key=True),
        *_numbers("position"),
        *_seconds("retained_since", nullable=True),
    )


def _texts(*names: str, nullable: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names]


def _numbers(*names: str, nullable: bool = False) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=nullable) for name in names]


def _seconds(*names: str, nullable: bool = False) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double, nullable=nullable) for name in names]
