"""The file of the response store: opens it, makes its tables, and removes the traces of what was deleted.

One connection has the file for itself (`locking_mode=EXCLUSIVE`): a reader in another process could keep deleted text
in the write-ahead log. All of this blocks, so nothing here may run in the event loop.

What must always hold: only the owner can read the file and its log; after `purge` neither contains a byte of what was
deleted; no message contains what is stored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..shared.private_files import make_private_database
from .stored import StoreError, StoreUnavailable

NAME: Final = "responses.sqlite3"
PAGE_BYTES: Final = 4096
OPEN_LOCK_S: Final = 2.0
"""How long a start waits for another process that has the file open."""
_PRAGMAS = (
    f"page_size={PAGE_BYTES}",
    "locking_mode=EXCLUSIVE",
    "journal_mode=WAL",
    "synchronous=NORMAL",
    "secure_delete=ON",
    "temp_store=MEMORY",  # no temporary file has a copy
    "cell_size_check=ON",
)
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
    _SCHEMA,
    "ALTER TABLE items ADD COLUMN logprobs BLOB NOT NULL DEFAULT x''",
)
"""What makes each version of the one before it."""
SCHEMA_VERSION: Final = len(_SCHEMAS)


def open_file(path: Path) -> sqlite3.Connection:
    """Open the database, making it if needed; it is then private and without traces. Raises StoreError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_private_database(path)
        connection = sqlite3.connect(path, timeout=OPEN_LOCK_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open the response store {path}: {error}") from None
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreError(f"the response store {path} was written by a newer version of quipu")
        if version < SCHEMA_VERSION:
            with transaction(connection):
                for statement in ";\n".join(_SCHEMAS[version:]).split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        purge(connection)
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"cannot use the response store {path}: {error}. {_hint(error)}") from None
    except StoreError:
        connection.close()
        raise
    return connection


def _hint(error: sqlite3.Error) -> str:
    if "locked" in str(error):
        return "Another process has it open."
    if isinstance(error, sqlite3.OperationalError):
        return "The server needs to write it."
    return "Move it away to start with an empty one; what it has is lost then."


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block does, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def purge(connection: sqlite3.Connection) -> None:
    """Move the log into the file, where deleted content is zeros, and truncate it. Raises StoreUnavailable."""
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_busy:
        raise StoreUnavailable("deleted text is still in the log of the response store")


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of all pages that are in use."""
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(num_pages - num_free) * PAGE_BYTES
