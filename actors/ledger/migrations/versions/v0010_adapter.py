"""The adapter of a request, by its digest, and the model that it changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    for name in ("adapter", "parent"):
        op.add_column("usage_records", sa.Column(name, sa.Text, nullable=True))
