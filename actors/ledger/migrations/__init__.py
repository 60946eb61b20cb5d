"""Alembic's migrations of the ledger's database; run by `database.py`, never by Alembic's own command."""
