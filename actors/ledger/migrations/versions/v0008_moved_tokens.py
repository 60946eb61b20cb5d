"""Which engine continued a request that another one had begun, and how many tokens were moved to it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("moved_tokens", sa.BigInteger, nullable=False, server_default="0"))
    for name in ("decode_engine", "decode_incarnation"):
        op.add_column("usage_records", sa.Column(name, sa.BigInteger, nullable=True))
