"""How many tokens were moved to which engine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("moved_by_engine", sa.Text, nullable=False, server_default=""))
