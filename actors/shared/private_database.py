"""SQLite files that hold clients' texts: readable by their owner alone, and without traces of what was deleted.

Used by whatever keeps texts for clients, never by the ledger, which has none. One process writes; its calls are made in
threads, one at a time.

What must always hold: what was deleted and committed is in no byte of the database, and after `forget_journal` in no
byte of its journal (a file system or a disk may keep old blocks that no file has any more).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from .private_files import make_private_database

FOLDER_MODE = 0o700
BUSY_S = 30.0


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can read, or make an existing one so. Raises OSError."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    path.chmod(FOLDER_MODE)


def open_private_database(path: Path) -> sqlite3.Connection:
    """Open a database, or create it. Raises OSError and sqlite3.Error.

    Transactions begin with `begin` and end with `commit`. A commit survives a power loss.
    """
    make_private_folder(path.parent)
    make_private_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        for setting in (
            "secure_delete = on",  # deleted bytes are overwritten
            "journal_mode = wal",  # SQLite gives the journal the database's mode
            "synchronous = full",
            "temp_store = memory",  # no files elsewhere
            "foreign_keys = on",
        ):
            connection.execute(f"pragma {setting}").fetchall()
        forget_journal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def forget_journal(connection: sqlite3.Connection) -> None:
    """Move everything that is committed into the database, and empty the journal. Raises sqlite3.Error."""
    connection.execute("pragma wal_checkpoint(truncate)").fetchall()
