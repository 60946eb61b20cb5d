"""Files that only their owner may read, whatever the umask and whichever version made them.

Used by the ledger and by the response store, whose contents are private, and for keys.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def make_private(path: Path) -> None:
    """Let only the owner read a file of ours, if it exists. Another user's file is not touched. Raises OSError."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    is_ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    if is_ours and found.st_mode & _OTHERS:
        path.chmod(PRIVATE)


def make_private_database(path: Path) -> None:
    """Make an empty SQLite file unless it exists, and make it and the files beside it private. Raises OSError.

    An existing database is not opened, since closing any descriptor of it would drop SQLite's locks. Files that SQLite
    makes beside a database later get the database's mode.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    except FileExistsError:
        make_private(path)
    else:
        path.chmod(PRIVATE)  # the umask may have removed the owner's own permissions
    for ending in ("-wal", "-shm", "-journal"):
        make_private(path.with_name(path.name + ending))


def write_private_once(path: Path, data: bytes) -> None:
    """Make a file at a path where other processes may make one, too: the first one stays. Raises OSError.

    What was made with a key is worth nothing without it: once this returns, the file survives a power loss.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names of a folder's files to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
