"""The loader: a task that loads the write-ahead file into the database, off the request path.

It waits for the journal to make progress and loads part of a segment in a worker thread. Then it deletes segments that
are no longer needed and, if a retention is set, old rows.

What must always hold: the loader never delays a request; while the database is unreachable nothing is lost or skipped;
a segment is deleted only if all of it is loaded, it contains no open entry, and no earlier segment remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

import sqlalchemy as sa
import structlog
import trio

from ..threads import run_in_thread
from .database import LedgerError, load, loaded_position, migrate, read_firsts, reason
from .durable_journal import DurableJournal
from .retention import RetentionClock, count_old, delete_old, keep_clock, read_clock
from .retries import RetryIndex
from .segment_files import Position, Scan, Storage, scan

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = structlog.get_logger("quipu.ledger")

READ_BYTES: Final = 512 * 1024
"""How much of the write-ahead file is read for one batch: a few hundred records."""
PAUSE_S: Final = 1.0
"""Between two batches while there is little to load, since one batch of a few is cheaper than many of one."""
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
RETENTION_EVERY_S: Final = 3600.0
LAST_LOAD_S: Final = 2.0
"""How long a stopping server continues to load. The next one loads the rest."""


class Loader:
    def __init__(
        self,
        engine: sa.Engine,
        ledger: str,
        storage: Storage,
        journal: DurableJournal,
        retries: RetryIndex,
        *,
        window_s: float,
        max_keys: int,
        retention_s: float | None,
        unix_time: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._storage = storage
        self._journal = journal
        self._retries = retries
        self._window_s = window_s
        self._max_keys = max_keys
        self._retention_s = retention_s
        self._unix_time = unix_time
        self.position: Position | None = None
        """Everything before it is in the database. None: that has not been reached yet."""
        self._cleaned_at: float | None = None
        self._retention_clock: RetentionClock | None = None
        self.trouble: str | None = None
        """Why nothing is being loaded, if so."""

    async def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                num_bytes = await self._load_some()
                await self._clean()
                backoff_s = FIRST_BACKOFF_S
                assert self.position is not None
                if num_bytes < READ_BYTES // 2:
                    await trio.sleep(PAUSE_S)
                    await self._journal.wait_beyond(self.position)
            except (sa.exc.SQLAlchemyError, LedgerError, OSError, MemoryError) as error:
                self._fail(error)
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def finish(self) -> None:
        """Load what is left, for at most `LAST_LOAD_S`."""
        with trio.move_on_after(LAST_LOAD_S):
            try:
                while self.position is None or self.position < self._journal.durable:
                    await self._load_some()
            except (sa.exc.SQLAlchemyError, LedgerError, OSError, MemoryError) as error:
                self._fail(error)

    async def _load_some(self) -> int:
        """Load one batch and return its size in bytes."""
        start = self.position or await self._reach_database()
        until = self._journal.durable
        batch = await _in_thread(self._load, start, until)
        num_bytes = batch.end.offset - start.offset if batch.end.segment == start.segment else READ_BYTES
        if self.trouble is not None:
            log.info("ledger.database_back")
            self.trouble = None
        self.position = batch.end
        for number in self._storage.numbers():
            if number >= min(batch.end.segment, self._journal.oldest_needed):
                break
            self._storage.delete(number)
        return num_bytes

    async def _reach_database(self) -> Position:
        """Migrate the database and read what it has, once per server."""
        await _in_thread(migrate, self._engine)
        known_s = await _in_thread(read_clock, self._engine, self._ledger)
        known_s = self._unix_time() if known_s is None else known_s
        self._retention_clock = RetentionClock(known_s, trio.current_time())
        since = self._unix_time() - self._window_s
        firsts = await _in_thread(read_firsts, self._engine, since, self._window_s, self._max_keys)
        for tenant, keys in firsts.items():
            self._retries.adopt(tenant, keys)
            await trio.lowlevel.checkpoint()

        def read() -> Position:
            with self._engine.connect() as connection:
                return loaded_position(connection, self._ledger)

        self.position = await _in_thread(read)
        return self.position

    def _load(self, start: Position, until: Position) -> Scan:
        """Load from `start` on, or move on to the next segment. Runs in a worker thread."""
        number = start.segment
        end = until.offset if number == until.segment else None
        try:
            data = self._storage.read(number, start.offset, end)
        except FileNotFoundError:
            data = b""
        found = scan(data[:READ_BYTES], start)
        if not found.entries:
            found = scan(data, start)  # there may be entries after unreadable bytes
        if found.entries:
            load(self._engine, self._ledger, found)
            return found
        later = [other for other in self._storage.numbers() if number < other <= until.segment]
        return Scan((), (), Position(later[0], 0) if later else max(start, until))

    async def _clean(self) -> None:
        monotonic_s = trio.current_time()
        if self._cleaned_at is not None and monotonic_s < self._cleaned_at + RETENTION_EVERY_S:
            return
        assert self._retention_clock is not None
        now = self._retention_clock.now(self._unix_time(), monotonic_s)
        await _in_thread(keep_clock, self._engine, self._ledger, now)
        if self._retention_s is not None:
            await self._delete_old(now - self._retention_s)
        self._cleaned_at = monotonic_s

    async def _delete_old(self, before: float) -> None:
        num_old = await _in_thread(count_old, self._engine, self._ledger, before)
        if num_old:
            log.info("ledger.retention_due", num_records=num_old, closed_before=before)
            num_deleted = await _in_thread(delete_old, self._engine, self._ledger, before)
            log.info("ledger.retention", num_deleted=num_deleted)

    def _fail(self, error: Exception) -> None:
        why = reason(error)
        if self.trouble is None:
            log.error("ledger.database_away", why=why, help="records wait in the write-ahead file until it is back")
        self.trouble = why


async def _in_thread(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `work` in a thread that is abandoned on cancellation: a hanging database must not keep the server up."""
    return await run_in_thread(work, *args, abandon_on_cancel=True)
