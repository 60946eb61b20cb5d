"""The seed that a request's tokens were drawn with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("usage_records", sa.Column("seed", sa.BigInteger, nullable=True))
