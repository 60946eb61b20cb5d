"""Runs migrations on the connection that `database.py` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from quipu.actors.ledger.schema import metadata  # absolute: Alembic loads this file by its path

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
