"""The durable journal: what is written when, when clients are released, and behaviour on a failing disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.testing

from quipu.actors.ledger.durable_journal import DurableJournal
from quipu.actors.ledger.entries import MAX_LINE_BYTES, Chain, EntryKind
from quipu.actors.ledger.preallocated_segments import PreallocatedSegments
from quipu.actors.ledger.retries import RetryIndex
from quipu.actors.ledger.segment_files import DiskStorage
from quipu.actors.ledger.segment_writer import RETRY_S
from quipu.actors.ledger.unadmitted import UnadmittedBudget
from quipu.actors.messages.outcomes import Outcome
from tests.actors.ledger.ledgers import (
    SEGMENT,
    T0,
    DiskDials,
    FaultyStorage,
    closed_ids,
    entries_in,
    record_of,
    so_far_of,
)


@attrs.define
class Desk:
    """A journal, and the names of the clients that were released."""

    folder: Path
    dials: DiskDials
    journal: DurableJournal
    released: list[str]

    def admit(self, name: str, **fields: Any) -> bool:
        return self.journal.admit(so_far_of(name, **fields))

    def close(self, name: str, **fields: Any) -> None:
        self.journal.close(record_of(name, **fields), partial(self.released.append, name))

    @property
    def written(self) -> list[str]:
        return closed_ids(entries_in(self.folder))


def open_desk(folder: Path, *, fsync: bool = False, segment_bytes: int = SEGMENT, **dials: Any) -> Desk:
    folder.mkdir(exist_ok=True)
    disk = DiskDials(**dials)
    segments = PreallocatedSegments(FaultyStorage(folder, disk), segment_bytes=segment_bytes, next_number=1)
    retries, unadmitted = RetryIndex(3600.0, 100), UnadmittedBudget(100)
    journal = DurableJournal(segments, Chain("srv"), retries, unadmitted, fsync=fsync, unix_time=lambda: T0)
    return Desk(folder, disk, journal, [])


@asynccontextmanager
async def running(desk: Desk) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.journal.run)
        yield
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait in real time: worker threads know no other clock."""
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.001)


# ---------------------------------------------------------------- when entries are written


def test_many_records_one_write(tmp_path: Path) -> None:
    """Everything since the last flush is one write, and each client is released once, after it."""
    desk = open_desk(tmp_path)
    for name in "abcdef":
        assert desk.admit(name)
    desk.close("a")
    desk.close("b", cached_by_tier=None)
    assert desk.dials.num_writes == 0 and desk.released == []
    desk.journal.flush()
    assert desk.dials.num_writes == 1 and desk.released == ["a", "b"]
    desk.journal.flush()
    assert desk.dials.num_writes == 1 and desk.released == ["a", "b"]
    kinds = [entry.kind for entry in entries_in(tmp_path)]
    assert kinds.count(EntryKind.ADMITTED) == 4, "a request that is already closed needs no open entry"
    assert kinds.count(EntryKind.CLOSED) == 2


def test_last_admission_counts(tmp_path: Path) -> None:
    """A request whose prompts are admitted one by one has several open entries; recovery takes the last one."""
    desk = open_desk(tmp_path)
    for num_choices in (1, 2):
        assert desk.admit("list", num_choices=num_choices)
    desk.journal.flush()
    assert desk.admit("list", num_choices=3)
    desk.journal.flush()
    assert [entry.record().num_choices for entry in entries_in(tmp_path)] == [2, 3]
    assert desk.journal.num_open == 1
    desk.close("list")
    desk.journal.flush()
    assert desk.journal.num_open == 0 and desk.written == ["list"]


def test_segments_follow_one_another(tmp_path: Path) -> None:
    """A full segment is followed by the next one; no entry spans two, and the chain continues."""
    desk = open_desk(tmp_path)
    names = [f"request-{i}" for i in range(600)]
    for at in range(0, len(names), 20):
        for name in names[at : at + 20]:
            assert desk.admit(name)
        desk.journal.flush()
        for name in names[at : at + 20]:
            desk.close(name)
        desk.journal.flush()
    assert desk.written == names and len(DiskStorage(tmp_path).numbers()) > 3
    chained = [entry for entry in entries_in(tmp_path) if entry.number is not None]
    assert [entry.number for entry in chained] == list(range(600))
    assert all(later.previous == entry.hash for entry, later in pairwise(chained))


def test_segments_of_open_entries_are_needed(tmp_path: Path) -> None:
    """The segment of an open entry is needed until its closing is written; another admission moves it."""
    desk = open_desk(tmp_path)
    assert desk.admit("long")
    desk.journal.flush()
    for i in range(300):
        assert desk.admit(f"r{i}")
        desk.close(f"r{i}")
        desk.journal.flush()
    assert desk.journal.durable.segment > 1
    assert desk.journal.oldest_needed == 1
    desk.close("long")
    assert desk.journal.oldest_needed == 1, "not written yet"
    desk.journal.flush()
    assert desk.journal.oldest_needed == desk.journal.durable.segment


# ---------------------------------------------------------------- a full disk


async def test_full_disk_refuses_and_loses_nothing(tmp_path: Path) -> None:
    """If no segment can be allocated, new requests are refused; admitted ones are closed in their reserved room."""
    desk = open_desk(tmp_path, max_segments=2)
    admitted: list[Any] = []
    while desk.admit(f"request-{len(admitted)}"):
        admitted.append(f"request-{len(admitted)}")
        desk.journal.flush()
    assert len(admitted) > 30 and "No space left" in (desk.journal.trouble or "")
    long = {"client_request_id": "\x01" * 256, "model": "m" * 256}
    for name in admitted:
        desk.close(name, cache_misses=record_of("").cache_misses * 40)
        desk.journal.flush()
    assert desk.written == desk.released == admitted
    assert desk.admit("small again") is True, "reserved room that was not needed must be free again"
    while desk.admit(f"{len(admitted)}", **long):
        admitted.append(f"{len(admitted)}")
    desk.dials.max_segments = None
    async with running(desk):
        await until(lambda: desk.journal.trouble is None)
        assert desk.admit("after")


def test_reserved_room_fits_the_longest_closing(tmp_path: Path) -> None:
    """Room is reserved for the longest possible closing of a request, not for a typical one."""
    desk = open_desk(tmp_path, max_segments=1, segment_bytes=4 * MAX_LINE_BYTES)
    fields: dict[str, Any] = {"client_request_id": "\x01" * 256, "idempotency_key": "\x02" * 256, "model": "\x03" * 256}
    names: list[str] = []
    while desk.admit(f"r{len(names)}", **fields):
        names.append(f"r{len(names)}")
        desk.journal.flush()
    huge = dict.fromkeys(("completion_tokens", "reasoning_tokens", "computed_tokens", "recomputed_tokens"), 2**62)
    for name in names:
        desk.close(name, **fields, **huge, cache_misses=record_of("").cache_misses * 40)
        desk.journal.flush()
    assert names and desk.written == names


def test_refused_requests_are_released_at_once_and_written_later(tmp_path: Path) -> None:
    """A request refused for lack of room gets its response now, and its record when there is room."""
    desk = open_desk(tmp_path, max_segments=1)
    names: list[str] = []
    while desk.admit(f"r{len(names)}"):
        names.append(f"r{len(names)}")
    desk.close("refused", outcome=Outcome.REJECTED, admitted_at=None)
    assert desk.released == ["refused"] and desk.journal.num_held_back == 1
    desk.journal.flush()
    assert "refused" not in desk.written
    for name in names:
        desk.close(name)
    desk.journal.flush()
    desk.journal.flush()
    assert sorted(desk.written) == sorted([*names, "refused"]) and desk.released.count("refused") == 1


# ---------------------------------------------------------------- a failing disk


async def test_failed_write_is_retried(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """While writes fail, no client is released and no request admitted; later each record is written once."""
    desk = open_desk(tmp_path)
    async with running(desk):
        assert desk.admit("a")
        desk.journal.flush()
        desk.dials.fails_writes = True
        desk.close("a")
        desk.journal.flush()
        assert desk.released == [] and "cannot write" in (desk.journal.trouble or "")
        assert not desk.admit("b")
        desk.close("refused", outcome=Outcome.REJECTED)
        await trio.sleep(RETRY_S * 3)
        assert desk.released == []
        desk.dials.fails_writes = False
        await trio.sleep(RETRY_S * 1.5)
        assert desk.released == ["a", "refused"] and desk.journal.trouble is None
        assert desk.admit("b")
    assert desk.written == ["a", "refused"]


async def test_short_write_is_completed(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """A write that failed half-way leaves no partial entry, and no later entry overtakes it."""
    desk = open_desk(tmp_path)
    async with running(desk):
        before = desk.journal.durable
        desk.dials.short_writes = True
        desk.close("a")
        desk.close("b")
        desk.journal.flush()
        assert desk.released == [] and desk.journal.durable == before
        desk.dials.short_writes = desk.dials.fails_writes = False
        await trio.sleep(RETRY_S * 1.5)
        assert desk.released == ["a", "b"] == desk.written


# ---------------------------------------------------------------- power loss


async def test_release_comes_after_fsync(tmp_path: Path) -> None:
    """With fsync a client is released after a sync that began after its record was written; many share one sync."""
    desk = open_desk(tmp_path, fsync=True)
    for name in "abc":
        desk.close(name)
    desk.journal.flush()
    assert desk.written == ["a", "b", "c"] and desk.released == [] and desk.dials.num_syncs == 0
    async with running(desk):
        await until(lambda: desk.released == ["a", "b", "c"])
        assert desk.dials.num_syncs == 1


async def test_failed_sync_rewrites(tmp_path: Path) -> None:
    """A failed sync may have dropped data, so no client is released until it is written again and synced."""
    desk = open_desk(tmp_path, fsync=True)
    desk.dials.fails_syncs = True
    desk.close("a")
    desk.journal.flush()
    async with running(desk):
        await until(lambda: desk.journal.trouble is not None)
        assert not desk.admit("b") and desk.released == []
        num_writes = desk.dials.num_writes
        desk.dials.fails_syncs = False
        await until(lambda: desk.released == ["a"])
        assert desk.dials.num_writes == num_writes + 1 and desk.journal.trouble is None
    assert desk.written == ["a"]


async def test_segments_are_preallocated(tmp_path: Path) -> None:
    """The next segment exists before the current one is full, and no admission waited for it."""
    desk = open_desk(tmp_path)
    async with running(desk):
        while desk.journal.durable.offset <= SEGMENT // 2:
            desk.close("r")
            desk.journal.flush()
        await until(lambda: len(DiskStorage(tmp_path).numbers()) == 2)
        assert desk.journal.durable.segment == 1


# ---------------------------------------------------------------- retries


def test_first_admitted_request_wins(tmp_path: Path) -> None:
    """A later request with the same digest is a retry of the first admitted one, but only within the window."""
    desk = open_desk(tmp_path)
    same: dict[str, Any] = {"idempotency_digest": "d" * 64}
    assert desk.journal.retry_of(so_far_of("refused", **same)) is None
    assert desk.admit("first", **same)
    assert desk.journal.retry_of(so_far_of("first", **same)) is None, "a request is not a retry of itself"
    assert desk.journal.retry_of(so_far_of("second", received_at=T0 + 60, **same)) == "first"
    assert desk.admit("second", retry_of="first", admitted_at=T0 + 3000.0, **same)
    assert desk.journal.retry_of(so_far_of("third", received_at=T0 + 3590, **same)) == "first"
    assert desk.journal.retry_of(so_far_of("other", idempotency_digest="e" * 64)) is None
    assert desk.journal.retry_of(so_far_of("none")) is None
    late = so_far_of("late", received_at=T0 + 3700, admitted_at=T0 + 3701, **same)
    assert desk.journal.retry_of(late) is None
    assert desk.journal.admit(late)
    assert desk.journal.retry_of(so_far_of("later", received_at=T0 + 3800, **same)) == "late"
