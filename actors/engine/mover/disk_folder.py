"""The folder of an engine's disk tier: chosen below the operator's path, and locked for as long as its process lives.

Used by `disk_store.py`. Folders are called engine-0, engine-1 and so on. An engine takes one whose blocks it can use,
otherwise the first that no living process has.

What must always hold: no two processes use a folder at the same time; symbolic links in the path's folder, and what
belongs to other users, are left alone; a path that cannot be used is a ValueError that names the flag.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs

LOCK_NAME = "lock"
CHOICE_TIMEOUT_S = 30.0
"""How long to wait for other engines that are choosing a folder; each takes milliseconds."""

_NAME = re.compile("engine-(0|[1-9][0-9]{0,5})")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@attrs.frozen
class LockedFolder:
    """A folder that no other process uses."""

    path: Path
    descriptor: int
    lock: int

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self.descriptor)
        os.close(self.lock)


def lock_folder(path: Path, is_preferred: Callable[[int], bool]) -> LockedFolder:
    """Choose a folder below `path`, which is created if necessary, and lock it.

    `is_preferred` is asked about folders that are free, by descriptor. Raises ValueError if `path` cannot be used.
    """
    try:
        with ExitStack() as opened:
            above = _open_path(path)
            opened.callback(os.close, above)
            # engines that start together would otherwise see each other's candidates as taken
            choosing = _open_lock(above)
            opened.callback(os.close, choosing)
            _wait_for(choosing)
            return _choose(path, above, is_preferred)
    except OSError as error:
        raise ValueError(f"--kv-disk {path} cannot be used: {error.strerror or error}") from error


def _open_path(path: Path) -> int:
    with suppress(FileExistsError):  # opening says better what it is instead
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _choose(path: Path, above: int, is_preferred: Callable[[int], bool]) -> LockedFolder:
    numbers = sorted(int(matched[1]) for name in os.listdir(above) if (matched := _NAME.fullmatch(name)))
    with ExitStack() as unused:
        free: LockedFolder | None = None
        for number in numbers:
            candidate = _lock_if_free(path / f"engine-{number}", above)
            if candidate is None:
                continue
            if is_preferred(candidate.descriptor):
                return candidate
            if free is None:
                free = candidate
                unused.callback(free.close)
            else:
                candidate.close()
        if free is None:
            return _create(path, above, set(numbers))
        unused.pop_all()
        return free


def _create(path: Path, above: int, taken: set[int]) -> LockedFolder:
    number = next(number for number in range(len(taken) + 1) if number not in taken)
    name = f"engine-{number}"
    os.mkdir(name, 0o700, dir_fd=above)
    created = _lock_if_free(path / name, above)
    if created is None:
        raise FileExistsError(f"{name} was replaced while it was created")
    return created


def _lock_if_free(path: Path, above: int) -> LockedFolder | None:
    """Return a folder; None if it is another process's or user's, or no folder."""
    with ExitStack() as undo:
        try:
            descriptor = os.open(path.name, _FOLDER_FLAGS, dir_fd=above)
            undo.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            os.fchmod(descriptor, 0o700)
            lock = _open_lock(descriptor)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        undo.pop_all()
        return LockedFolder(path, descriptor, lock)


def _open_lock(folder: int) -> int:
    descriptor = os.open(LOCK_NAME, _LOCK_FLAGS, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(f"{LOCK_NAME} is not a regular file")
    return descriptor


def _wait_for(lock: int) -> None:
    deadline_s = time.monotonic() + CHOICE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process holds its file {LOCK_NAME}") from None
            time.sleep(0.01)
        else:
            return
