"""The accountant's journal as a write-ahead file: `quipu.actors.accountant.journal.Journal`, durable.

    admit ──▶ open entry, and room for its closing      close ──▶ chained entry, waits with its release
    flush ──▶ one write(2) of all that was said since ──▶ (with fsync: one sync of all that was written) ──▶ releases

Called from the event loop by the accountant; `run` does what may take long: taking room for segments ahead of need,
syncing, and trying again what failed.

What must always hold: a release is called once, and after its entry is written (with fsync: synced); an entry that
could not be written stays here and is tried again, and nobody new is admitted meanwhile; whoever was admitted has
room for a closing, and a record. Of those that were refused each tenant has so many an hour (`refusals.py`).
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import structlog
import trio

from ..messages.outcomes import Outcome
from ..messages.usage_record import UsageRecord
from .entries import GROWTH_BYTES, MAX_LINE_BYTES, Chain, Line, admitted_line
from .preallocated_segments import OpenSegment, Room
from .refusals import RefusalBudget
from .retries import RetryIndex
from .segment_files import Position, SegmentFile

log = structlog.get_logger("quipu.ledger")

RETRY_S = 0.25
"""Between two attempts at writing or syncing."""
ROOM_RETRY_S = 1.0
"""Between two attempts at taking room on a full disk."""
MAX_HELD_BACK = 10_000
"""Records of requests that were never admitted, held in memory while the disk is full."""


@attrs.define(eq=False)
class OpenEntry:
    """A request that was admitted, until its closing is durable."""

    reserved: int
    """Bytes kept free for the closing."""
    segment: int | None = None
    """Where its last open entry is; None: not written yet."""


@attrs.frozen(eq=False)
class _Waiting:
    """A line to be written."""

    line: bytes
    opens: str | None = None
    """Request id, of an open entry."""
    closes: OpenEntry | None = None
    release: Callable[[], None] | None = None


@attrs.frozen(eq=False)
class _Written:
    """Lines that one write has taken."""

    file: SegmentFile
    offset: int
    data: bytes
    lines: tuple[_Waiting, ...]
    end: Position


class DurableJournal:
    def __init__(
        self,
        room: Room,
        chain: Chain,
        retries: RetryIndex,
        refusals: RefusalBudget,
        *,
        fsync: bool,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._room = room
        self._chain = chain
        self._retries = retries
        self._refusals = refusals
        self._fsync = fsync
        self._unix_time = unix_time
        self._open: dict[str, OpenEntry] = {}
        self._reserved = 0
        self._new: dict[str, Line] = {}
        """Open entries since the last flush, the last one of each request."""
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._held_back: deque[UsageRecord] = deque()
        self._unsynced: deque[_Written] = deque()
        self._full: list[OpenSegment] = []
        """Filled segments whose last lines are not synced yet."""
        self._closings: set[OpenEntry] = set()
        self._durable = room.current.end
        self._progress = trio.Event()
        self._has_failed = trio.Event()
        self._to_sync = trio.Event()
        self._wants_room = trio.Event()
        self._trouble: dict[str, str] = {}
        self.num_lost = 0
        """Records of requests never admitted that were given up while the disk was full."""

    # ------------------------------------------------------------ for the accountant

    def admit(self, so_far: UsageRecord) -> bool:
        if "write" in self._trouble or "sync" in self._trouble:
            return False
        line = admitted_line(self._chain.server, self._unix_time(), so_far)
        request_id = so_far.request_id
        before = self._open.get(request_id)
        closing = len(line.data) + GROWTH_BYTES
        more = len(line.data) + closing - (before.reserved if before else 0)
        if not self._has_room(more):
            return False
        entry = before or OpenEntry(0)
        self._reserved += closing - entry.reserved
        entry.reserved = closing
        self._open[request_id] = entry
        if replaced := self._new.get(request_id):
            self._waiting_bytes -= len(replaced.data)
        self._new[request_id] = line
        self._waiting_bytes += len(line.data)
        self._retries.admit(so_far)
        return True

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        entry = self._open.pop(record.request_id, None)
        if entry is None:
            if record.outcome is Outcome.REJECTED and not self._refusals.take(record.tenant, self._unix_time()):
                release()  # there is nothing to wait for
                return
            if self._held_back or not self._has_room(MAX_LINE_BYTES):
                self._hold_back(record)
                release()  # it was refused; its client must hear why
                return
        else:
            self._reserved -= entry.reserved
            if unwritten := self._new.pop(record.request_id, None):
                self._waiting_bytes -= len(unwritten.data)
        self._close(record, entry, release)

    def flush(self) -> None:
        while self._held_back and self._has_room(MAX_LINE_BYTES):
            self._close(self._held_back.popleft(), None, None)
        for request_id, line in self._new.items():
            self._waiting.append(_Waiting(line.data, opens=request_id))
        self._new.clear()
        if self._waiting and "write" not in self._trouble:
            self._write()

    def retry_of(self, record: UsageRecord) -> str | None:
        return self._retries.first_of(record)

    # ------------------------------------------------------------ for the service

    def start(self, says: Mapping[str, object]) -> None:
        self._say(self._chain.start(self._unix_time(), says))

    def recover(self, record: UsageRecord) -> None:
        """Close what an earlier life left open."""
        if not self._has_room(MAX_LINE_BYTES):
            raise OSError(errno.ENOSPC, self.trouble or "no room")
        self._say(self._chain.close(self._unix_time(), record, recovered=True))

    def stop(self, says: Mapping[str, object]) -> None:
        """The last entry."""
        self.flush()
        self._say(self._chain.stop(self._unix_time(), says))

    def close_files(self) -> None:
        """Write and sync what is left. Raises OSError for what cannot be."""
        self._write()
        if self._trouble.get("write"):
            raise OSError(errno.EIO, self.trouble or "")
        self._sync(tuple(self._unsynced), rewrite="sync" in self._trouble)
        self._settle(tuple(self._unsynced))
        self._room.current.file.sync()
        self._room.close()

    @property
    def trouble(self) -> str | None:
        """Why nobody is admitted; None where all is well."""
        return "; ".join(self._trouble.values()) or None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_held_back(self) -> int:
        return len(self._held_back)

    @property
    def num_suppressed(self) -> int:
        """Records of refused requests that were not written, beyond their tenants' budgets."""
        return self._refusals.num_suppressed

    @property
    def durable(self) -> Position:
        """Everything before it may be read."""
        return self._durable

    @property
    def oldest_needed(self) -> int:
        """Segments from this one on hold open entries, or are being filled."""
        needed = [entry.segment for entry in (*self._open.values(), *self._closings) if entry.segment is not None]
        return min(*needed, self._durable.segment, self._room.current.number)

    async def wait_beyond(self, position: Position) -> None:
        """Until there is something durable behind a position."""
        while self._durable <= position:
            await self._progress.wait()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._make_room_in_time)
            nursery.start_soon(self._try_again)
            if self._fsync:
                nursery.start_soon(self._sync_in_groups)

    # ------------------------------------------------------------ writing

    def _say(self, line: Line) -> None:
        self._waiting.append(_Waiting(line.data))
        self._waiting_bytes += len(line.data)

    def _close(self, record: UsageRecord, entry: OpenEntry | None, release: Callable[[], None] | None) -> None:
        line = self._chain.close(self._unix_time(), record)
        if entry is not None:
            self._closings.add(entry)
        self._waiting.append(_Waiting(line.data, closes=entry, release=release))
        self._waiting_bytes += len(line.data)

    def _write(self) -> None:
        """One write for each segment that the waiting lines reach into: nearly always one."""
        try:
            while self._waiting:
                self._write_into_current()
        except OSError as error:
            self._fail("write", f"cannot write the usage ledger: {error.strerror or error}")
            self._has_failed.set()
            return
        self._mend("write")
        if self._room.num_spare == 0 and self._room.current.used > self._room.current.size // 2:
            self._wants_room.set()

    def _write_into_current(self) -> None:
        segment = self._room.current
        left = segment.size - segment.used
        lines: list[_Waiting] = []
        for waiting in self._waiting:
            if len(waiting.line) > left:
                break
            left -= len(waiting.line)
            lines.append(waiting)
        if lines:
            data = b"".join(waiting.line for waiting in lines)
            _write_all(segment.file, data, segment.used)
            written = _Written(segment.file, segment.used, data, tuple(lines), Position(0, 0))
            segment.used += len(data)
            self._took(attrs.evolve(written, end=segment.end))
        if self._waiting:
            self._full.append(self._room.advance())
            self._close_full()

    def _took(self, written: _Written) -> None:
        for line in written.lines:
            self._waiting.popleft()
            if line.opens is not None and (entry := self._open.get(line.opens)) is not None:
                entry.segment = written.end.segment
        self._waiting_bytes -= len(written.data)
        if self._fsync:
            self._unsynced.append(written)
            self._to_sync.set()
        else:
            self._settle((written,))

    def _settle(self, durable: tuple[_Written, ...]) -> None:
        """These lines cannot be lost any more."""
        for written in durable:
            if self._unsynced and self._unsynced[0] is written:
                self._unsynced.popleft()
            self._durable = written.end
            for line in written.lines:
                if line.closes is not None:
                    self._closings.discard(line.closes)
                if line.release is not None:
                    line.release()
        self._close_full()
        self._progress.set()
        self._progress = trio.Event()

    def _close_full(self) -> None:
        unsynced = {id(written.file) for written in self._unsynced}
        for segment in [segment for segment in self._full if id(segment.file) not in unsynced]:
            self._full.remove(segment)
            segment.file.close()

    # ------------------------------------------------------------ room

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so much is free beside what is promised; takes another segment where it is not."""
        if self._free() >= num_bytes:
            return True
        if "room" in self._trouble:
            return False
        try:
            self._room.make()
        except OSError as error:
            self._no_room(error)
            return False
        return self._free() >= num_bytes

    def _free(self) -> int:
        return self._room.num_bytes - self._reserved - self._waiting_bytes

    def _no_room(self, error: OSError) -> None:
        self._fail("room", f"no room for the usage ledger: {error.strerror or error}")
        self._wants_room.set()

    def _hold_back(self, record: UsageRecord) -> None:
        if len(self._held_back) == MAX_HELD_BACK:
            self._held_back.popleft()
            self.num_lost += 1
            log.error("ledger.record_lost", num_lost=self.num_lost, help="of a request that was never admitted")
        self._held_back.append(record)

    async def _make_room_in_time(self) -> None:
        while True:
            await self._wants_room.wait()
            try:
                enough = "room" not in self._trouble  # with one spare segment
                await trio.to_thread.run_sync(partial(self._room.make, unless_spare=enough))
            except OSError as error:
                self._no_room(error)
                await trio.sleep(ROOM_RETRY_S)
                continue
            self._wants_room = trio.Event()
            self._mend("room")
            self.flush()

    # ------------------------------------------------------------ failures, syncing

    async def _try_again(self) -> None:
        while True:
            await self._has_failed.wait()
            self._has_failed = trio.Event()
            await trio.sleep(RETRY_S)
            self._write()

    async def _sync_in_groups(self) -> None:
        rewrite = False
        while True:
            await self._to_sync.wait()
            group = tuple(self._unsynced)
            if not group:
                self._to_sync = trio.Event()
                continue
            try:
                await trio.to_thread.run_sync(partial(self._sync, group, rewrite=rewrite))
            except OSError as error:
                # what was not synced may be gone from the cache: write it again before the next attempt
                self._fail("sync", f"cannot sync the usage ledger: {error.strerror or error}")
                rewrite = True
                await trio.sleep(RETRY_S)
                continue
            rewrite = False
            self._mend("sync")
            self._settle(group)

    def _sync(self, group: tuple[_Written, ...], *, rewrite: bool = False) -> None:
        if rewrite:
            for written in group:
                _write_all(written.file, written.data, written.offset)
        for file in {id(written.file): written.file for written in group}.values():
            file.sync()

    def _fail(self, part: str, why: str) -> None:
        if part not in self._trouble:
            log.error("ledger.trouble", why=why, help="no request is admitted until it is over")
        self._trouble[part] = why

    def _mend(self, part: str) -> None:
        if self._trouble.pop(part, None):
            log.info("ledger.mended", part=part)


def _write_all(file: SegmentFile, data: bytes, offset: int) -> None:
    """Raises OSError; then it must all be written again at the same place."""
    done = 0
    while done < len(data):
        num_bytes = file.write_at(data[done:], offset + done)
        if num_bytes == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += num_bytes
