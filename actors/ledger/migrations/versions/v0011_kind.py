"""What a request asked for: `generate`, `embed` or `score`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("kind", sa.Text, nullable=False, server_default="generate"))
