"""Remembers the digests of files that have not changed, so that a restart does not read a checkpoint again.

A small JSON file, kept for `weights_digest.py` beside what depends on the digests. The engines of a server start
together: the first to open it computes, the others wait for it.

What must always hold: a digest is returned only for a file with the same device, inode, size and times as when it was
computed; whatever is in the memo's file, and whatever happens to it, the worst is that digests are computed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

MAX_ENTRIES = 500
"""More than a checkpoint has files."""
MAX_BYTES = 1 << 20
LOCK_TIMEOUT_S = 600.0
"""How long to wait for another process that computes: many times as long as reading a large checkpoint takes."""
SETTLED_S = 2.0
"""A file that changed more recently may change again without another time."""

_DIGEST = re.compile("[0-9a-f]{64}")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@attrs.frozen
class FileStamp:
    """What shows that a file is still the same one, unchanged. Nobody can set the last one."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def name(self) -> str:
        return " ".join(map(str, attrs.astuple(self)))


class DigestMemo:
    """Digests by file."""

    def __init__(self, entries: dict[str, str]) -> None:
        self._entries = entries
        self._began_ns = time.time_ns()
        self.has_news = False

    def get(self, stamp: FileStamp) -> bytes | None:
        """Return the digest of a file, if it is known."""
        digest = self._entries.get(stamp.name)
        return None if digest is None else bytes.fromhex(digest)

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        """Remember the digest of a file, unless it changed just before this memo was opened, or since."""
        if self._began_ns - stamp.changed_ns > SETTLED_S * 1e9:
            self._entries[stamp.name] = digest.hex()
            self.has_news = True

    def packed(self) -> bytes:
        """Return the contents of the memo's file: the entries that were made last."""
        newest = dict(list(self._entries.items())[-MAX_ENTRIES:])
        return json.dumps({"version": 1, "sha256": newest}).encode()


@contextmanager
def opened_memo(path: Path | None) -> Iterator[DigestMemo]:
    """Read the memo at `path` for the length of a block, and write what is new.

    Without a path, or if it cannot be used, the memo is empty and is not kept.
    """
    descriptor = None if path is None else _open(path)
    if descriptor is None:
        yield DigestMemo({})
        return
    try:
        memo = DigestMemo(_entries_in(descriptor))
        yield memo
        if memo.has_news:
            with suppress(OSError):  # a full disk, for example
                content = memo.packed()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """Open and lock a file of ours that nobody else can write, created if necessary; None if it cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        return None
    status = os.fstat(descriptor)
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if is_ours and not stat.S_IMODE(status.st_mode) & 0o022 and _is_locked(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_locked(descriptor: int) -> bool:
    """Lock a file, and return whether that succeeded in time."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return False
        else:
            return True
    return False


def _entries_in(descriptor: int) -> dict[str, str]:
    try:
        read = json.loads(os.pread(descriptor, MAX_BYTES, 0))
        entries = read["sha256"] if read["version"] == 1 else {}
        return {
            name: digest
            for name, digest in entries.items()
            if isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
