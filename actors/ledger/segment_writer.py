"""Writes lines into the write-ahead file's segments, in order, and retries what failed. Used by the journal.

    append ──▶ queue ──▶ one write(2) of all queued lines ──▶ (with fsync: one sync of all unsynced writes) ──▶ releases

What must always hold: a release is called once, and only after its line is written (with fsync: synced); a line that
could not be written stays queued.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable

import attrs
import structlog
import trio

from ..threads import run_in_thread
from .preallocated_segments import OpenSegment, PreallocatedSegments
from .segment_files import Position, SegmentFile

log = structlog.get_logger("quipu.ledger")

RETRY_S = 0.25
"""Between two attempts to write or sync."""


class Troubles:
    """What keeps records from being written at the moment, by part: `write`, `sync` or `room`."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def __contains__(self, part: str) -> bool:
        return part in self._why

    @property
    def text(self) -> str | None:
        return "; ".join(self._why.values()) or None

    def fail(self, part: str, why: str) -> None:
        if part not in self._why:
            log.error("ledger.trouble", why=why, help="no request is admitted until it is over")
        self._why[part] = why

    def mend(self, part: str) -> None:
        if self._why.pop(part, None):
            log.info("ledger.mended", part=part)


@attrs.define(eq=False)
class OpenEntry:
    """An admitted request, until its closing record is durable."""

    reserved: int
    segment: int | None = None
    """The segment of its last `admitted` line. None: not written yet."""


@attrs.frozen(eq=False)
class _QueuedLine:
    data: bytes
    opens: OpenEntry | None
    closes: OpenEntry | None
    release: Callable[[], None] | None


@attrs.frozen(eq=False)
class _Write:
    """Lines that one write has taken."""

    file: SegmentFile
    offset: int
    data: bytes
    lines: tuple[_QueuedLine, ...]
    end: Position


class SegmentWriter:
    def __init__(
        self, segments: PreallocatedSegments, troubles: Troubles, want_segment: Callable[[], None], *, fsync: bool
    ) -> None:
        """`want_segment` is called when the current segment is half full and there is no spare one."""
        self._segments = segments
        self._troubles = troubles
        self._want_segment = want_segment
        self._fsync = fsync
        self._queue: deque[_QueuedLine] = deque()
        self.num_queued_bytes = 0
        self._unsynced: deque[_Write] = deque()
        self._full: list[OpenSegment] = []
        """Full segments whose last lines are not synced yet."""
        self.closing: set[OpenEntry] = set()
        """Entries whose closing record is not durable yet."""
        self.durable = segments.current.end
        """Everything before it may be read."""
        self._progress = trio.Event()
        self._has_failed = trio.Event()
        self._to_sync = trio.Event()

    async def wait_beyond(self, position: Position) -> None:
        """Wait until something after `position` is durable."""
        while self.durable <= position:
            await self._progress.wait()

    def append(
        self,
        data: bytes,
        *,
        opens: OpenEntry | None = None,
        closes: OpenEntry | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        if closes is not None:
            self.closing.add(closes)
        self._queue.append(_QueuedLine(data, opens, closes, release))
        self.num_queued_bytes += len(data)

    def write(self) -> None:
        """Write all queued lines: one write for each segment that they reach into, nearly always one."""
        try:
            while self._queue:
                self._write_into_current()
        except OSError as error:
            self._troubles.fail("write", f"cannot write the usage ledger: {error.strerror or error}")
            self._has_failed.set()
            return
        self._troubles.mend("write")
        if self._segments.num_spare == 0 and self._segments.current.used > self._segments.current.size // 2:
            self._want_segment()

    def flush(self) -> None:
        """Write all queued lines, unless a failed write is waiting to be retried."""
        if self._queue and "write" not in self._troubles:
            self.write()

    def close(self) -> None:
        """Write and sync what is left, and close the files. Raises OSError if that fails."""
        self.write()
        if "write" in self._troubles:
            raise OSError(errno.EIO, self._troubles.text or "")
        unsynced = tuple(self._unsynced)
        self._sync(unsynced, "sync" in self._troubles)
        self._settle(unsynced)
        self._segments.current.file.sync()
        self._segments.close()

    def _write_into_current(self) -> None:
        segment = self._segments.current
        left = segment.size - segment.used
        lines: list[_QueuedLine] = []
        for line in self._queue:
            if len(line.data) > left:
                break
            left -= len(line.data)
            lines.append(line)
        if lines:
            data = b"".join(line.data for line in lines)
            offset = segment.used
            _write_all(segment.file, data, offset)
            segment.used += len(data)
            self._note_written(_Write(segment.file, offset, data, tuple(lines), segment.end))
        if self._queue:
            self._full.append(self._segments.advance())
            self._close_full()

    def _note_written(self, write: _Write) -> None:
        for line in write.lines:
            self._queue.popleft()
            if line.opens is not None:
                line.opens.segment = write.end.segment
        self.num_queued_bytes -= len(write.data)
        if self._fsync:
            self._unsynced.append(write)
            self._to_sync.set()
        else:
            self._settle((write,))

    def _settle(self, durable: tuple[_Write, ...]) -> None:
        """Release lines that can no longer be lost."""
        for write in durable:
            if self._unsynced and self._unsynced[0] is write:
                self._unsynced.popleft()
            self.durable = write.end
            for line in write.lines:
                if line.closes is not None:
                    self.closing.discard(line.closes)
                if line.release is not None:
                    line.release()
        self._close_full()
        self._progress.set()
        self._progress = trio.Event()

    def _close_full(self) -> None:
        unsynced = {id(write.file) for write in self._unsynced}
        for segment in [segment for segment in self._full if id(segment.file) not in unsynced]:
            self._full.remove(segment)
            segment.file.close()

    async def retry_writes(self) -> None:
        while True:
            await self._has_failed.wait()
            self._has_failed = trio.Event()
            await trio.sleep(RETRY_S)
            self.write()

    async def sync_in_groups(self) -> None:
        """Sync what was written, in a worker thread, until cancelled."""
        rewrite = False
        while True:
            await self._to_sync.wait()
            group = tuple(self._unsynced)
            if not group:
                self._to_sync = trio.Event()
                continue
            try:
                await run_in_thread(self._sync, group, rewrite)
            except (OSError, MemoryError) as error:
                # the kernel may have dropped what was not synced: write it again before the next attempt
                why = getattr(error, "strerror", None) or str(error) or "out of memory"
                self._troubles.fail("sync", f"cannot sync the usage ledger: {why}")
                rewrite = True
                await trio.sleep(RETRY_S)
                continue
            rewrite = False
            self._troubles.mend("sync")
            self._settle(group)

    def _sync(self, group: tuple[_Write, ...], rewrite: bool) -> None:
        if rewrite:
            for write in group:
                _write_all(write.file, write.data, write.offset)
        for file in {id(write.file): write.file for write in group}.values():
            file.sync()


def _write_all(file: SegmentFile, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`. After an OSError all of it must be written again at the same offset."""
    done = 0
    while done < len(data):
        num_bytes = file.write_at(data[done:], offset + done)
        if num_bytes == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += num_bytes
