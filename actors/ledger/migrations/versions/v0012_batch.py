"""The batch of which a request was a line."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("batch_id", sa.Text, nullable=True))
