"""The contents of files: a folder that only its owner can read, one file each.

    new()      a file without a name that a client knows, for what arrives or is being made
    keep()     it gets its name, once it is complete and on the disk
    erase()    it is overwritten, then removed

Every method blocks and is called in a thread. What must always hold: a name exists only with complete contents; what
is removed was overwritten before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Final

from quipu.actors.shared.private_database import make_private_folder
from quipu.actors.shared.private_files import PRIVATE

_UNNAMED: Final = ".new-"
_ZEROS: Final = bytes(1 << 20)
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileFolder:
    def __init__(self, path: Path) -> None:
        """Make the folder if it does not exist. Raises OSError."""
        self._path = path
        make_private_folder(path)

    def new(self) -> Path:
        path = self._path / f"{_UNNAMED}{secrets.token_hex(16)}"
        os.close(os.open(path, _FLAGS, PRIVATE))
        return path

    def append(self, path: Path, data: bytes | bytearray) -> None:
        with path.open("ab") as file:
            file.write(data)

    def keep(self, path: Path, name: str) -> int:
        """Give a complete file its name, and return its size in bytes. May be repeated after an OSError."""
        named = self._path / name
        if not named.exists():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            path.rename(named)
        self._sync()
        return named.stat().st_size

    def open(self, name: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        return (self._path / name).open("rb")

    def read(self, name: str, start: int, length: int) -> bytes:
        with self.open(name) as file:
            file.seek(start)
            return file.read(length)

    def read_if_there(self, name: str, start: int, length: int) -> bytes:
        """Do as `read`; return nothing if there is no such file."""
        try:
            return self.read(name, start, length)
        except FileNotFoundError:
            return b""

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def erase(self, name: str) -> None:
        """Overwrite and remove a file. Does nothing if there is none."""
        self.erase_path(self._path / name)

    def erase_path(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            left = os.fstat(descriptor).st_size
            while left > 0:
                left -= os.write(descriptor, _ZEROS[:left])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path.unlink()
        self._sync()

    def erase_others(self, names: Collection[str]) -> int:
        """Erase all files but these, which a server that was killed has left, and return how many there were."""
        others = [path for path in self._path.iterdir() if path.name not in names]
        for path in others:
            self.erase_path(path)
        return len(others)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
