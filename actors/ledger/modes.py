"""Who may read a ledger's files: their owner, whatever the umask was and whichever version made them.

Used by `database.py` and `folder.py`. What must always hold: a file of somebody else is left as it is; a database that
is there is never opened here, since closing any descriptor of it would drop the locks that SQLite has on it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_BESIDE: Final = ("-wal", "-shm", "-journal")


def tighten(path: Path) -> None:
    """Take a file of ours from all others. One that is not there is nobody's. Raises OSError."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    is_ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    if is_ours and found.st_mode & _OTHERS:
        path.chmod(PRIVATE)


def make_private_database(path: Path) -> None:
    """Make an empty SQLite file unless there is one, and tighten it with those beside it. Raises OSError.

    What SQLite makes beside a database later has the database's own mode.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    except FileExistsError:
        tighten(path)
    else:
        path.chmod(PRIVATE)  # a umask may have taken what its owner needs
    for ending in _BESIDE:
        tighten(path.with_name(path.name + ending))
