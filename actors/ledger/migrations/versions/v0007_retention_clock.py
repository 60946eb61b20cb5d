"""Until when time has passed for certain, so that a wrong clock makes retention delete little."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("ledger_sources", sa.Column("retention_clock", sa.Double))
