"""Records, write-ahead files and databases for the ledger's tests, and a disk with dials for faults."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from quipu.actors.ledger.entries import Entry, EntryKind
from quipu.actors.ledger.segment_files import DiskStorage, Position, SegmentFile, scan
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.counts import Known
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord

T0 = 1_700_000_000.0
SEGMENT = 256 * 1024


def record_of(name: str, **changes: Any) -> UsageRecord:
    """Make the record of a finished request with 100 prompt tokens, 48 of them cached, and 10 completion tokens."""
    fields: dict[str, Any] = {
        "request_id": name,
        "tenant": "acme",
        "key_id": "key-1",
        "model": "demo",
        "endpoint": "completions",
        "received_at": T0,
        "admitted_at": T0 + 0.5,
        "first_token_at": T0 + 1.0,
        "closed_at": T0 + 2.0,
        "outcome": Outcome.FINISHED,
        "num_choices": 1,
        "prompt": Known(100),
        "cached": Known(48),
        "cached_by_tier": {"device": 48, "host": 0, "disk": 0, "remote": 0, "unattributed": 0},
        "cache_write": Known(48),
        "completion_tokens": 10,
        "computed_tokens": 52,
        "cache_misses": (CacheMiss(MissReason.DIVERGED, 48),),
        "incarnation": 1,
    }
    return UsageRecord(**{**fields, **changes})


def so_far_of(name: str, **changes: Any) -> UsageRecord:
    """Make the record of the same request at its admission."""
    return record_of(
        name,
        **{
            "outcome": Outcome.CANCELLED,
            "first_token_at": None,
            "completion_tokens": 0,
            "computed_tokens": 0,
            **changes,
        },
    )


def entries_in(folder: Path) -> list[Entry]:
    """Return every readable entry of a write-ahead file, oldest first."""
    storage = DiskStorage(folder)
    return [
        placed.entry
        for number in storage.numbers()
        for placed in scan(storage.read(number), Position(number, 0)).entries
    ]


def closed_ids(entries: Iterable[Entry]) -> list[str]:
    return [entry.request_id for entry in entries if entry.kind is EntryKind.CLOSED]


@attrs.define
class DiskDials:
    """The faults of a disk."""

    max_segments: int | None = None
    """Segments that the disk has room for; ENOSPC beyond."""
    fails_writes: bool = False
    short_writes: bool = False
    """A write takes half, the next one raises."""
    fails_syncs: bool = False
    num_writes: int = 0
    num_syncs: int = 0


@attrs.define(eq=False)
class FaultyFile:
    file: SegmentFile
    dials: DiskDials

    def write_at(self, data: bytes, offset: int) -> int:
        if self.dials.fails_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.dials.num_writes += 1
        if self.dials.short_writes:
            self.dials.fails_writes = True
            return self.file.write_at(data[: len(data) // 2], offset)
        return self.file.write_at(data, offset)

    def sync(self) -> None:
        if self.dials.fails_syncs:
            raise OSError(errno.EIO, "Input/output error")
        self.dials.num_syncs += 1
        self.file.sync()

    def close(self) -> None:
        self.file.close()


class FaultyStorage(DiskStorage):
    """A real folder on a disk with the faults set by its dials."""

    def __init__(self, folder: Path, dials: DiskDials) -> None:
        super().__init__(folder)
        self._dials = dials

    def create(self, number: int, size: int) -> SegmentFile:
        if self._dials.max_segments is not None and len(self.numbers()) >= self._dials.max_segments:
            raise OSError(errno.ENOSPC, "No space left on device")
        return FaultyFile(super().create(number, size), self._dials)
