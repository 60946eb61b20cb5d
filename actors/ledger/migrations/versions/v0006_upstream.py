"""What an upstream said that a request used, and whether it said how many tokens it made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("completion_kind", sa.Text, nullable=False, server_default="known"))
    op.add_column("usage_records", sa.Column("upstream_usage", sa.Text, nullable=True))
