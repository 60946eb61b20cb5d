"""The ledger's folder in a data directory: its files, and the lock of the server that writes.

    DATA_DIR/ledger/ledger.json      the ledger's id, and which database it is loaded into
    DATA_DIR/ledger/lock             held by the server that writes
    DATA_DIR/ledger/00000001.wal     the write-ahead file's segments
    DATA_DIR/ledger.sqlite3          the database, unless --ledger-url names another

What must always hold: one server writes at a time; a ledger keeps its id as long as its folder exists.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import msgspec

from ..shared.private_files import PRIVATE, make_private
from .database import SQLITE_NAME, LedgerError, redacted, sqlite_url

FOLDER: Final = "ledger"
_ABOUT: Final = "ledger.json"
_LOCK: Final = "lock"


class About(msgspec.Struct, frozen=True):
    ledger: str
    database: str | None
    """The URL without its password; None: SQLite in the data directory."""


@attrs.frozen
class LedgerFolder:
    data_dir: Path

    @property
    def path(self) -> Path:
        return self.data_dir / FOLDER

    def about(self) -> About | None:
        """Read `ledger.json`. Returns None if no server has kept a ledger here. Raises LedgerError."""
        try:
            return msgspec.json.decode((self.path / _ABOUT).read_bytes(), type=About)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LedgerError(f"cannot read {self.path / _ABOUT}: {error}") from None

    def open_for_writing(self, url: str | None) -> About:
        """Write `ledger.json` with the database now used; a new ledger gets an id. Raises LedgerError and OSError."""
        before = self.about()
        about = About(before.ledger if before else f"led-{secrets.token_hex(8)}", redacted(url) if url else None)
        if about != before:
            new = self.path / f"{_ABOUT}.new"
            with open(new, "wb", opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, PRIVATE)) as file:
                file.write(msgspec.json.encode(about))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path / _ABOUT)
        return about

    def make_private(self) -> None:
        """Make private the files that an older version, or a copy, left readable by others. Raises OSError."""
        for path in self.path.iterdir():
            make_private(path)

    def url_for_reading(self, url: str | None) -> str | None:
        """Return the database's URL. None: nothing was loaded yet. Raises LedgerError if --ledger-url is needed."""
        if url is not None:
            return url
        about = self.about()
        if about is not None and about.database is not None:
            raise LedgerError(
                f"the records of {self.data_dir} are loaded into {about.database}: pass that as --ledger-url"
            )
        return sqlite_url(self.data_dir) if (self.data_dir / SQLITE_NAME).exists() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; make the folder if needed. Raises LedgerError if another server holds it, or on I/O errors."""
        try:
            # usage records are private
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.mkdir(exist_ok=True, mode=0o700)
            fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(f"cannot write to the data directory {self.data_dir}: {error.strerror}") from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(
                    f"another server keeps its ledger in {self.data_dir}: each needs its own --data-dir"
                ) from None
            yield
        finally:
            os.close(fd)

    @property
    def is_in_use(self) -> bool:
        try:
            fd = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False
