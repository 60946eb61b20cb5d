"""The real journal of the usage ledger over files in memory, which can be full, fail, or be written in part.

What must always hold: what is read back after a crash is what was synced (without `fsync`, what was written).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import attrs

from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.ledger.entries import Chain
from quipu.actors.ledger.preallocated_segments import PreallocatedSegments
from quipu.actors.ledger.retries import RetryIndex
from quipu.actors.ledger.unadmitted import UnadmittedBudget

FIRST_LINES = 4


@attrs.define
class DiskDials:
    is_full: bool = False
    fails_writes: bool = False
    writes_half: bool = False
    fails_syncs: bool = False


@attrs.define(eq=False)
class MemoryFile:
    """One segment."""

    dials: DiskDials
    data: bytearray
    synced: bytearray
    """What a crash of the machine would leave."""
    unsynced: list[range] = attrs.field(factory=list)
    """What was written since the last sync, successful or not: a kernel drops what it could not write."""

    def write_at(self, data: bytes, offset: int) -> int:
        if self.dials.fails_writes:
            raise OSError(errno.EIO, "Input/output error")
        if self.dials.writes_half:
            data = data[: (len(data) + 1) // 2]
        self.data[offset : offset + len(data)] = data
        self.unsynced.append(range(offset, offset + len(data)))
        return len(data)

    def sync(self) -> None:
        unsynced, self.unsynced = self.unsynced, []
        if self.dials.fails_syncs:
            raise OSError(errno.EIO, "Input/output error")
        for written in unsynced:
            self.synced[written.start : written.stop] = self.data[written.start : written.stop]

    def close(self) -> None:
        pass


@attrs.define(eq=False)
class MemoryStorage:
    """Implements the ledger's `Storage`."""

    dials: DiskDials = attrs.field(factory=DiskDials)
    files: dict[int, MemoryFile] = attrs.field(factory=dict)

    def create(self, number: int, size: int) -> MemoryFile:
        if self.dials.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        file = self.files[number] = MemoryFile(self.dials, bytearray(size), bytearray(size))
        return file

    def numbers(self) -> list[int]:
        return sorted(self.files)

    def read(self, number: int, start: int = 0, end: int | None = None) -> bytes:
        if number not in self.files:
            raise FileNotFoundError(number)
        return bytes(self.files[number].data[start:end])

    def truncate(self, number: int, size: int) -> None:
        del self.files[number].data[size:]

    def delete(self, number: int) -> None:
        self.files.pop(number, None)

    def surviving(self, *, synced: bool) -> bytes:
        """Return what a crash would leave now, of all segments in order."""
        return b"".join(bytes(file.synced if synced else file.data) for _, file in sorted(self.files.items()))


def open_journal(
    storage: MemoryStorage, segment_bytes: int, unix_time: Callable[[], float], *, fsync: bool, padding: int = 0
) -> DurableJournal:
    """Return a journal that begins with an empty ledger. `run` has to be run.

    `padding`: bytes of each of the first lines, so that a run reaches the end of a segment.
    """
    segments = PreallocatedSegments(storage, segment_bytes=segment_bytes, next_number=1)
    retries, unadmitted = RetryIndex(3600.0, 1000), UnadmittedBudget(10_000)
    journal = DurableJournal(segments, Chain("srv-simulated"), retries, unadmitted, fsync=fsync, unix_time=unix_time)
    for _ in range(FIRST_LINES):
        journal.start({"padding": "." * padding})
    return journal
