"""The write-ahead file on disk: numbered segments of a fixed size, allocated in advance.

The journal writes through `Storage`; everything else reads. A segment is created full of zeros, so its entries end
where the zeros begin. Numbers only increase, and the newest segment is never deleted, so no position is used twice.

What must always hold: writing into a segment never needs more disk space; an entry never spans two segments.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Protocol

import attrs

from ..shared.private_files import sync_folder
from .entries import Entry, parse_line

SUFFIX: Final = ".wal"
_NUMBER_BITS: Final = 32


@attrs.frozen(order=True)
class Position:
    """A place in the write-ahead file."""

    segment: int
    offset: int

    @property
    def packed(self) -> int:
        """The position as one number, with the same order."""
        return self.segment << _NUMBER_BITS | self.offset

    @classmethod
    def unpack(cls, packed: int) -> Position:
        return cls(packed >> _NUMBER_BITS, packed & ((1 << _NUMBER_BITS) - 1))


BEGINNING: Final = Position(0, 0)


class SegmentFile(Protocol):
    """One segment, open for writing."""

    def write_at(self, data: bytes, offset: int) -> int:
        """Call write(2) once and return how many bytes it wrote. Raises OSError."""

    def sync(self) -> None:
        """Return once everything written would survive a power loss. Raises OSError."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Where segments are kept."""

    def create(self, number: int, size: int) -> SegmentFile:
        """Create a segment with all its space allocated. After an OSError there is no such segment."""

    def numbers(self) -> list[int]:
        """Return the numbers of the existing segments, ascending."""

    def read(self, number: int, start: int = 0, end: int | None = None) -> bytes:
        """Read a segment's bytes from `start` to `end`. Raises FileNotFoundError."""

    def truncate(self, number: int, size: int) -> None:
        """Cut a segment to `size`. Raises OSError."""

    def delete(self, number: int) -> None: ...


class DiskFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write_at(self, data: bytes, offset: int) -> int:
        return os.pwrite(self._fd, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class DiskStorage:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, number: int, size: int) -> SegmentFile:
        path = self._path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _allocate(fd, size)
            os.fsync(fd)
            sync_folder(self._folder)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return DiskFile(fd)

    def numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return sorted(int(path.stem) for path in self._folder.glob(f"*{SUFFIX}") if path.stem.isdigit())

    def read(self, number: int, start: int = 0, end: int | None = None) -> bytes:
        with self._path(number).open("rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(max(0, end - start))

    def truncate(self, number: int, size: int) -> None:
        os.truncate(self._path(number), size)

    def delete(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{SUFFIX}"


_ZEROS = bytes(1 << 16)


@attrs.frozen
class LocatedEntry:
    """An entry and the position where it ends."""

    entry: Entry
    end: Position


@attrs.frozen
class Damage:
    """Bytes that are not an entry."""

    start: Position
    num_bytes: int
    is_tail: bool
    """Whether it looks like an interrupted write: nothing readable follows in its segment, and the line has no newline
    or (after a power loss) a hole of zeros. A complete line that was changed does not."""


@attrs.frozen
class Scan:
    entries: tuple[LocatedEntry, ...]
    damages: tuple[Damage, ...]
    end: Position
    """After the last readable entry, or where the scan began."""


def scan(data: bytes, start: Position) -> Scan:
    """Parse the bytes read from `start` on. Trailing zeros are unused space."""
    data = _used(data)
    entries: list[LocatedEntry] = []
    damaged: list[tuple[int, int]] = []  # start and end of each damage
    at = 0
    end = 0
    while at < len(data):
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline + 1
        entry = None if newline < 0 else parse_line(data[at:newline])
        if entry is not None:
            end = stop
            entries.append(LocatedEntry(entry, Position(start.segment, start.offset + stop)))
        elif damaged and damaged[-1][1] == at:
            damaged[-1] = (damaged[-1][0], stop)
        else:
            damaged.append((at, stop))
        at = stop
    damages = tuple(
        Damage(
            Position(start.segment, start.offset + low),
            high - low,
            is_tail=low >= end and (b"\n" not in data[low:high] or b"\0" in data[low:high]),
        )
        for low, high in damaged
    )
    return Scan(tuple(entries), damages, Position(start.segment, start.offset + end))


def _used(data: bytes) -> bytes:
    """Return data without its trailing zeros, of which there may be megabytes: stripped at once, they would hold the
    interpreter lock for ten milliseconds."""
    end = len(data)
    while end >= len(_ZEROS) and data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return data[:end].rstrip(b"\0")


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        zeros = bytes(min(size, 1 << 20))  # the file system cannot allocate: write instead
        for offset in range(0, size, len(zeros)):
            os.pwrite(fd, zeros[: size - offset], offset)
