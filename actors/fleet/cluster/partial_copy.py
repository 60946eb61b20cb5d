"""A checkpoint on its way: the folder on this node into which `shipping.py` writes pieces, in any order.

It becomes the checkpoint's folder by one rename, when every piece is on the disk. After a crash, the next fetch keeps
the pieces that are right.

What must always hold: nothing is written outside the folder, whatever is in it; a folder under its final name is
complete.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from ...shared.checkpoint import CheckpointError
from .manifest import Manifest, ManifestFile, hash_span

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512
"""The unit of `st_blocks`, on every file system."""


@attrs.frozen
class PieceKey:
    file: ManifestFile
    number: int

    @property
    def digest(self) -> bytes:
        return self.file.digests[self.number]


@attrs.frozen
class PartialCopy:
    """Several threads may call `write`."""

    manifest: Manifest
    """It has been checked."""
    folder: Path
    final: Path

    def prepare(self) -> None:
        """Create every file with its size, and remove whatever else is there. Raises CheckpointError."""
        try:
            if self.folder.is_symlink():
                raise CheckpointError(f"{self.folder} is a symbolic link: remove it")
            self.folder.mkdir(mode=0o700, exist_ok=True)
            names = {file.name for file in self.manifest.files}
            for path in self.folder.iterdir():
                if path.name not in names or not stat.S_ISREG(path.lstat().st_mode):
                    _remove(path)
            for file in self.manifest.files:
                with self._opened(file) as descriptor:
                    if os.fstat(descriptor).st_size != file.size:
                        os.ftruncate(descriptor, file.size)
        except OSError as error:
            raise self._explain(error) from error

    def missing_pieces(self) -> Iterator[PieceKey]:
        """Yield the pieces that are not there, or not right. Reads all that is there."""
        for file in self.manifest.files:
            for number in range(len(file.digests)):
                piece = PieceKey(file, number)
                if not self._has(piece):
                    yield piece

    def check_room(self) -> None:
        """Raise CheckpointError if the disk has no room for what is missing."""
        needed, free = self._count_room()
        if needed > free:
            raise self._no_room()

    def write(self, piece: PieceKey, data: memoryview) -> None:
        """Write a piece at its place. Raises CheckpointError if the disk does not take it."""
        at, _ = self.manifest.span(piece.file, piece.number)
        try:
            with self._opened(piece.file) as descriptor:
                while data:
                    written = os.pwrite(descriptor, data, at)
                    data, at = data[written:], at + written
        except OSError as error:
            raise self._explain(error) from error

    def finish(self) -> None:
        """Give the folder its final name, once all of it is on the disk. Raises CheckpointError."""
        try:
            for file in self.manifest.files:
                with self._opened(file) as descriptor:
                    os.fsync(descriptor)
            _sync_folder(self.folder)
            self.folder.rename(self.final)
            _sync_folder(self.final.parent)
        except OSError as error:
            raise self._explain(error) from error

    def _has(self, piece: PieceKey) -> bool:
        start, end = self.manifest.span(piece.file, piece.number)
        try:
            with self._opened(piece.file) as descriptor:
                # a hole was never written, and need not be read: most of a file that has just been started
                if os.lseek(descriptor, start, os.SEEK_HOLE) < end:
                    return False
                return hash_span(descriptor, start, end) == piece.digest
        except OSError:
            return False

    @contextmanager
    def _opened(self, file: ManifestFile) -> Iterator[int]:
        descriptor = os.open(self.folder / file.name, _FLAGS, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _explain(self, error: OSError) -> CheckpointError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._no_room()
        return CheckpointError(f"{error.filename or self.folder} cannot be written: {error.strerror or error}")

    def _no_room(self) -> CheckpointError:
        needed, free = self._count_room()
        return CheckpointError(
            f"no room in {self.final.parent}: the checkpoint needs {needed} bytes more, and {free} bytes are free"
        )

    def _count_room(self) -> tuple[int, int]:
        """Return how many bytes have no room on the disk yet, and how many are free there."""
        needed = sum(max(file.size - _allocated_bytes(self.folder / file.name), 0) for file in self.manifest.files)
        return needed, shutil.disk_usage(self.final.parent).free


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
