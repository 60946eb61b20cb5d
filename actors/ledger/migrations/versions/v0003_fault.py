"""Why the server itself failed a request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("fault", sa.Text, nullable=True))
