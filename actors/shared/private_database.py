"""SQLite files that hold clients' texts: readable by their owner alone, and without traces of what was deleted.

Used by whatever keeps texts for clients, never by the ledger, which has none. One connection has such a file for itself
(`locking_mode=EXCLUSIVE`): a reader in another process could keep deleted text in the journal. Its calls are made in
threads, one at a time.

What must always hold: what was deleted and committed is in no byte of the database, and after `forget_journal` in no
byte of its journal (a file system or a disk may keep old blocks that no file has any more).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from .private_files import make_private_database

PAGE_BYTES: Final = 4096
LOCK_S: Final = 2.0
"""How long a start waits for another process that has the file open."""
_FOLDER_MODE: Final = 0o700
_PRAGMAS: Final = (
    f"page_size={PAGE_BYTES}",
    "locking_mode=EXCLUSIVE",
    "journal_mode=WAL",  # SQLite gives the journal the database's mode
    "secure_delete=ON",  # deleted bytes are overwritten
    "temp_store=MEMORY",  # no temporary file has a copy
    "cell_size_check=ON",
)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can read, or make an existing one so. Raises OSError."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    path.chmod(_FOLDER_MODE)


def open_private_database(
    path: Path, *, synchronous: Literal["NORMAL", "FULL"], lock_s: float = LOCK_S
) -> sqlite3.Connection:
    """Open a database, or create it. Raises OSError and sqlite3.Error.

    Transactions are those of `transaction`. A commit survives the death of the process; FULL: also a power loss.
    """
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    make_private_database(path)
    connection = sqlite3.connect(path, timeout=lock_s, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (*_PRAGMAS, f"synchronous={synchronous}"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        forget_journal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def make_tables(connection: sqlite3.Connection, versions: Sequence[Sequence[str]]) -> bool:
    """Bring a database to the newest version, each made of the one before it by some statements.

    Returns False, and changes nothing, if it is of a newer one. Raises sqlite3.Error.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < len(versions):
        with transaction(connection):
            for statement in chain.from_iterable(versions[version:]):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={len(versions)}")
    return bool(version <= len(versions))


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


def forget_journal(connection: sqlite3.Connection) -> bool:
    """Move everything that is committed into the database, and empty the journal. Raises sqlite3.Error.

    Returns False if something that still reads keeps the journal as it is.
    """
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy
