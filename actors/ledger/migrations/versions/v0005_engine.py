"""Which of several engines admitted a request, and what the router expected it to have cached."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("engine", sa.BigInteger))
    op.add_column("usage_records", sa.Column("router_estimate_tokens", sa.BigInteger))
