"""The durable journal: implements the accountant's `Journal` with a write-ahead file.

    admit ──▶ `admitted` line, and room reserved for the closing record
    close ──▶ chained `closed` line, queued with its release
    flush ──▶ all lines since the last flush are written at once (`segment_writer.py`)

The accountant calls it from the event loop; `run` does what may take long.

What must always hold: while records cannot be written, no new request is admitted; an admitted request has room for its
closing record and gets one. Of requests that are rejected, or cancelled before they are admitted, each tenant gets a
limited number of records an hour (`unadmitted.py`).
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import structlog
import trio

from ..messages.outcomes import Outcome
from ..messages.usage_record import UsageRecord
from ..threads import run_in_thread
from .entries import GROWTH_BYTES, MAX_LINE_BYTES, Chain, Line, admitted_line
from .preallocated_segments import PreallocatedSegments
from .retries import RetryIndex
from .segment_files import Position
from .segment_writer import OpenEntry, SegmentWriter, Troubles
from .unadmitted import UnadmittedBudget

log = structlog.get_logger("quipu.ledger")

ROOM_RETRY_S = 1.0
"""Between two attempts to allocate a segment on a full disk."""
MAX_HELD_BACK = 10_000
"""Records of requests that were never admitted, kept in memory while the disk is full."""


class DurableJournal:
    def __init__(
        self,
        segments: PreallocatedSegments,
        chain: Chain,
        retries: RetryIndex,
        unadmitted: UnadmittedBudget,
        *,
        fsync: bool,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._segments = segments
        self._chain = chain
        self._retries = retries
        self._unadmitted = unadmitted
        self._fsync = fsync
        self._unix_time = unix_time
        self._open: dict[str, OpenEntry] = {}
        self._reserved = 0
        self._new: dict[str, Line] = {}
        """`admitted` lines since the last flush, the last one of each request."""
        self._new_bytes = 0
        self._held_back: deque[UsageRecord] = deque()
        self._wants_segment = trio.Event()
        self._troubles = Troubles()
        # the event is replaced when it was served, so it is looked up each time
        self._writer = SegmentWriter(segments, self._troubles, lambda: self._wants_segment.set(), fsync=fsync)
        self.num_lost = 0
        """Records of never-admitted requests that were dropped while the disk was full."""

    # ------------------------------------------------------------ for the accountant

    def admit(self, so_far: UsageRecord) -> bool:
        if "write" in self._troubles or "sync" in self._troubles:
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
            self._new_bytes -= len(replaced.data)
        self._new[request_id] = line
        self._new_bytes += len(line.data)
        self._retries.admit(so_far)
        return True

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        entry = self._open.pop(record.request_id, None)
        if entry is None:
            if not self._unadmitted.take(record.tenant, record.outcome, self._unix_time()):
                release()  # there is no record to wait for
                return
            if self._held_back or not self._has_room(MAX_LINE_BYTES):
                self._hold_back(record)
                release()  # if the request was rejected, its client must be told why
                return
        else:
            self._reserved -= entry.reserved
            if unwritten := self._new.pop(record.request_id, None):
                self._new_bytes -= len(unwritten.data)
        self._append_record(record, entry, release)

    def flush(self) -> None:
        while self._held_back and self._has_room(MAX_LINE_BYTES):
            self._append_record(self._held_back.popleft(), None, None)
        for request_id, line in self._new.items():
            self._writer.append(line.data, opens=self._open[request_id])
        self._new.clear()
        self._new_bytes = 0
        self._writer.flush()

    def retry_of(self, record: UsageRecord) -> str | None:
        return self._retries.first_of(record)

    @property
    def trouble(self) -> str | None:
        return self._troubles.text

    # ------------------------------------------------------------ for the service

    def start(self, values: Mapping[str, object]) -> None:
        """Append this server's first entry."""
        self._writer.append(self._chain.start(self._unix_time(), values).data)

    def recover(self, record: UsageRecord) -> None:
        """Append the closing record of a request that an earlier server left open. Raises OSError."""
        if not self._has_room(MAX_LINE_BYTES):
            raise OSError(errno.ENOSPC, self.trouble or "no room")
        self._writer.append(self._chain.close(self._unix_time(), record, recovered=True).data)

    def stop(self, values: Mapping[str, object]) -> None:
        """Append this server's last entry."""
        self.flush()
        self._writer.append(self._chain.stop(self._unix_time(), values).data)

    def close_files(self) -> None:
        """Write and sync what is left. Raises OSError if that fails."""
        self._writer.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_held_back(self) -> int:
        return len(self._held_back)

    @property
    def num_suppressed(self) -> Mapping[Outcome, int]:
        """Requests without a record, because their tenant's budget was used up."""
        return self._unadmitted.num_suppressed

    @property
    def durable(self) -> Position:
        return self._writer.durable

    @property
    def oldest_needed(self) -> int:
        """The first segment that holds an open entry or is still being filled."""
        entries = (*self._open.values(), *self._writer.closing)
        needed = [entry.segment for entry in entries if entry.segment is not None]
        return min(*needed, self.durable.segment, self._segments.current.number)

    async def wait_beyond(self, position: Position) -> None:
        await self._writer.wait_beyond(position)

    async def run(self) -> None:
        """Allocate, sync and retry until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._allocate_segments)
            nursery.start_soon(self._writer.retry_writes)
            if self._fsync:
                nursery.start_soon(self._writer.sync_in_groups)

    def _append_record(self, record: UsageRecord, entry: OpenEntry | None, release: Callable[[], None] | None) -> None:
        line = self._chain.close(self._unix_time(), record)
        self._writer.append(line.data, closes=entry, release=release)

    # ------------------------------------------------------------ room

    def _has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` are free beyond what is reserved; allocates a segment if not."""
        if self._num_free_bytes() >= num_bytes:
            return True
        if "room" in self._troubles:
            return False
        try:
            self._segments.allocate()
        except OSError as error:
            self._note_full_disk(error)
            return False
        return self._num_free_bytes() >= num_bytes

    def _num_free_bytes(self) -> int:
        return self._segments.num_bytes - self._reserved - self._new_bytes - self._writer.num_queued_bytes

    def _note_full_disk(self, error: OSError | MemoryError) -> None:
        why = getattr(error, "strerror", None) or str(error) or "out of memory"
        self._troubles.fail("room", f"no room for the usage ledger: {why}")
        self._wants_segment.set()

    def _hold_back(self, record: UsageRecord) -> None:
        if len(self._held_back) == MAX_HELD_BACK:
            self._held_back.popleft()
            self.num_lost += 1
            log.error("ledger.record_lost", num_lost=self.num_lost, help="of a request that was never admitted")
        self._held_back.append(record)

    async def _allocate_segments(self) -> None:
        while True:
            await self._wants_segment.wait()
            try:
                enough = "room" not in self._troubles  # then a single spare segment is enough
                await run_in_thread(partial(self._segments.allocate, unless_spare=enough))
            except (OSError, MemoryError) as error:
                self._note_full_disk(error)
                await trio.sleep(ROOM_RETRY_S)
                continue
            self._wants_segment = trio.Event()
            self._troubles.mend("room")
            self.flush()
