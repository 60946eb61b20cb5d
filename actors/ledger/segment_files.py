"""The write-ahead file on disk: numbered segments of a fixed size, their room taken in advance.

`durable_journal.py` writes through `Storage`, everybody else reads. A segment is created full of zeros, so its entries
end where the zeros begin. Numbers only ever rise, and the newest segment is never deleted: a position, once passed, is
never used again.

What must always hold: writing into a segment needs no more room on the disk; an entry never spans two segments.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Protocol

import attrs

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
        """As one number, of the same order."""
        return self.segment << _NUMBER_BITS | self.offset

    @classmethod
    def unpack(cls, packed: int) -> Position:
        return cls(packed >> _NUMBER_BITS, packed & ((1 << _NUMBER_BITS) - 1))


BEGINNING: Final = Position(0, 0)


class SegmentFile(Protocol):
    """One segment, open for writing."""

    def write_at(self, data: bytes, offset: int) -> int:
        """One write(2): how many bytes it took. Raises OSError."""
        ...

    def sync(self) -> None:
        """Return when what was written survives a power loss. Raises OSError."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """Where segments are kept."""

    def create(self, number: int, size: int) -> SegmentFile:
        """A new segment with all its room taken. Raises OSError; then there is no such segment."""
        ...

    def numbers(self) -> list[int]:
        """Of the segments that there are, ascending."""
        ...

    def read(self, number: int, start: int = 0, end: int | None = None) -> bytes:
        """Its bytes from `start` to `end`. Raises FileNotFoundError."""
        ...

    def size(self, number: int) -> int: ...

    def truncate(self, number: int, size: int) -> None:
        """Give back the room behind `size`. Raises OSError."""
        ...

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
    """Segments as files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, number: int, size: int) -> SegmentFile:
        path = self._path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _take_room(fd, size)
            os.fsync(fd)
            _sync_folder(self._folder)
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

    def size(self, number: int) -> int:
        return self._path(number).stat().st_size

    def truncate(self, number: int, size: int) -> None:
        os.truncate(self._path(number), size)

    def delete(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}{SUFFIX}"


@attrs.frozen
class Placed:
    """An entry and where it ends."""

    entry: Entry
    end: Position


@attrs.frozen
class Damage:
    """Bytes that are no entry."""

    start: Position
    num_bytes: int
    is_tail: bool
    """Nothing readable follows in its segment, and it looks like what a write that was cut off leaves: a line without
    its newline, or (after a power loss) with a hole of zeros. A whole line that was changed does not."""


@attrs.frozen
class Scan:
    """What a stretch of one segment holds."""

    entries: tuple[Placed, ...]
    damages: tuple[Damage, ...]
    end: Position
    """Behind the last readable entry, or where the scan began."""


def scan(data: bytes, start: Position) -> Scan:
    """Read the bytes that lie at `start`; the zeros behind them are room that nobody has used yet."""
    data = data.rstrip(b"\0")
    entries: list[Placed] = []
    spoilt: list[tuple[int, int]] = []  # where damage begins and ends
    at = 0
    end = 0
    while at < len(data):
        newline = data.find(b"\n", at)
        stop = len(data) if newline < 0 else newline + 1
        entry = None if newline < 0 else parse_line(data[at:newline])
        if entry is not None:
            end = stop
            entries.append(Placed(entry, Position(start.segment, start.offset + stop)))
        elif spoilt and spoilt[-1][1] == at:
            spoilt[-1] = (spoilt[-1][0], stop)
        else:
            spoilt.append((at, stop))
        at = stop
    damages = tuple(
        Damage(
            Position(start.segment, start.offset + low),
            high - low,
            is_tail=low >= end and (b"\n" not in data[low:high] or b"\0" in data[low:high]),
        )
        for low, high in spoilt
    )
    return Scan(tuple(entries), damages, Position(start.segment, start.offset + end))


def _take_room(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        zeros = bytes(min(size, 1 << 20))  # the file system cannot promise room: use it
        for offset in range(0, size, len(zeros)):
            os.pwrite(fd, zeros[: size - offset], offset)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
