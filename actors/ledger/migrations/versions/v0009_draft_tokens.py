"""How many tokens were guessed and verified for a request, and how many of them were right."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    for name in (
        "draft_tokens",
        "accepted_draft_tokens",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    ):
        op.add_column("usage_records", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
