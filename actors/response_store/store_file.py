"""The file of the response store: opens it, makes its tables, and removes the traces of what was deleted.

How it is opened, `../shared/private_database.py` says. All of this blocks, so nothing here may run in the event loop.

What must always hold: only the owner can read the file and its log; after `purge` neither contains a byte of what was
deleted; no message contains what is stored.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from ..shared.private_database import PAGE_BYTES, forget_journal, make_tables, open_private_database
from .stored import StoreError, StoreUnavailable

NAME: Final = "responses.sqlite3"
_SCHEMA = """
CREATE TABLE objects(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, kind TEXT NOT NULL,
  model TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at REAL NOT NULL, state TEXT NOT NULL,
  is_background INTEGER NOT NULL, num_bytes INTEGER NOT NULL, input INTEGER NOT NULL, output INTEGER NOT NULL,
  context BLOB NOT NULL, metadata BLOB NOT NULL, head BLOB NOT NULL, events BLOB);
CREATE INDEX objects_of_tenant ON objects(tenant, kind, number);
CREATE INDEX objects_by_expiry ON objects(expires_at);
CREATE INDEX objects_by_age ON objects(tenant, expires_at);
CREATE TABLE labels(
  tenant TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, object INTEGER NOT NULL,
  PRIMARY KEY(tenant, key, value, object)) WITHOUT ROWID;
CREATE INDEX labels_of_object ON labels(object);
CREATE TABLE segments(number INTEGER PRIMARY KEY AUTOINCREMENT, num_refs INTEGER NOT NULL);
CREATE TABLE items(
  number INTEGER PRIMARY KEY AUTOINCREMENT, segment INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX items_of_segment ON items(segment, number, id);
"""
_SCHEMAS: Final = (
    _SCHEMA.split(";\n"),
    ["ALTER TABLE items ADD COLUMN logprobs BLOB NOT NULL DEFAULT x''"],
)
"""What makes each version of the one before it."""
SCHEMA_VERSION: Final = len(_SCHEMAS)


def open_file(path: Path) -> sqlite3.Connection:
    """Open the database, making it if needed; it is then private and without traces. Raises StoreError."""
    try:
        connection = open_private_database(path, synchronous="NORMAL")
    except OSError as error:
        raise StoreError(f"cannot open the response store {path}: {error}") from None
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    try:
        if not make_tables(connection, _SCHEMAS):
            raise StoreError(f"the response store {path} was written by a newer version of quipu")
        purge(connection)
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, error) from None
    except StoreError:
        connection.close()
        raise
    return connection


def _unusable(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(f"cannot use the response store {path}: {error}. {_hint(error)}")


def _hint(error: sqlite3.Error) -> str:
    if "locked" in str(error):
        return "Another process has it open."
    if isinstance(error, sqlite3.OperationalError):
        return "The server needs to write it."
    return "Move it away to start with an empty one; what it has is lost then."


def purge(connection: sqlite3.Connection) -> None:
    """Move the log into the file, where deleted content is zeros, and truncate it. Raises StoreUnavailable."""
    if not forget_journal(connection):
        raise StoreUnavailable("deleted text is still in the log of the response store")


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of all pages that are in use."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(num_pages - num_free) * PAGE_BYTES
