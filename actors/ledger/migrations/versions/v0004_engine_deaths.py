"""How many engines died while they held a request that was resumed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("engine_deaths", sa.BigInteger, nullable=False, server_default="0"))
