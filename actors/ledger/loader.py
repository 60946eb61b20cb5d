"""The loader: puts what the write-ahead file holds into the database, off the request path.

An actor of its own. It waits for the journal to make progress, reads a stretch of a segment, and loads it in a worker
thread; then it deletes the segments that nobody needs any more, and, where a retention is set, old rows.

What must always hold: nothing here delays a request; while the database is away nothing is lost, and nothing is given
up; a segment is deleted only when all of it is loaded, no open entry lies in it, and none before it remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import sqlalchemy as sa
import structlog
import trio

from .database import Batch, LedgerError, load, loaded_position, migrate, read_firsts, reason
from .retention import delete_old
from .retries import RetryIndex
from .segment_files import Position, Storage, scan

T = TypeVar("T")

log = structlog.get_logger("quipu.ledger")

READ_BYTES: Final = 512 * 1024
"""Of the write-ahead file in one batch: a few hundred records."""
PAUSE_S: Final = 1.0
"""Between two batches while there is little to load: a batch of a few is cheaper than each alone."""
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
RETENTION_EVERY_S: Final = 3600.0
LAST_LOAD_S: Final = 2.0
"""How long a stopping server goes on loading; the next one loads the rest."""


class Source(Protocol):
    """The journal, as the loader sees it."""

    @property
    def durable(self) -> Position: ...

    @property
    def oldest_needed(self) -> int: ...

    async def wait_beyond(self, position: Position) -> None: ...


class Loader:
    def __init__(
        self,
        engine: sa.Engine,
        ledger: str,
        storage: Storage,
        journal: Source,
        retries: RetryIndex,
        *,
        window_s: float,
        max_keys: int,
        retention_s: float | None,
        unix_time: Callable[[], float] = time.time,
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
        self._position: Position | None = None
        """None: nobody has reached the database yet."""
        self._cleaned_at: float | None = None
        self.trouble: str | None = None
        """Why nothing is loaded at the moment."""

    @property
    def position(self) -> Position | None:
        """Everything before it is in the database."""
        return self._position

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._go_on()
                backoff_s = FIRST_BACKOFF_S
            except (sa.exc.SQLAlchemyError, LedgerError, OSError) as error:
                self._fail(error)
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def finish(self) -> None:
        """Load what is left, for a bounded time."""
        with trio.move_on_after(LAST_LOAD_S):
            try:
                while self._position is None or self._position < self._journal.durable:
                    await self._load_some()
            except (sa.exc.SQLAlchemyError, LedgerError, OSError) as error:
                self._fail(error)

    async def _go_on(self) -> None:
        num_bytes = await self._load_some()
        await self._clean()
        assert self._position is not None
        if num_bytes < READ_BYTES // 2:
            await trio.sleep(PAUSE_S)
            await self._journal.wait_beyond(self._position)

    async def _load_some(self) -> int:
        """One batch; how many bytes it was."""
        start = self._position or await self._reach_database()
        until = self._journal.durable
        batch = await _in_thread(partial(self._load, start, until))
        num_bytes = batch.end.offset - start.offset if batch.end.segment == start.segment else READ_BYTES
        if self.trouble is not None:
            log.info("ledger.database_back")
            self.trouble = None
        self._position = batch.end
        for number in self._storage.numbers():
            if number >= min(batch.end.segment, self._journal.oldest_needed):
                break
            self._storage.delete(number)
        return num_bytes

    async def _reach_database(self) -> Position:
        """For the first time in this life."""
        await _in_thread(partial(migrate, self._engine))
        since = self._unix_time() - self._window_s
        read_keys = partial(read_firsts, self._engine, since, self._window_s, self._max_keys)
        for tenant, keys in (await _in_thread(read_keys)).items():
            self._retries.adopt(tenant, keys)
            await trio.lowlevel.checkpoint()

        def read() -> Position:
            with self._engine.connect() as connection:
                return loaded_position(connection, self._ledger)

        self._position = await _in_thread(read)
        return self._position

    def _load(self, start: Position, until: Position) -> Batch:
        """In a worker thread: load a stretch from `start` on, or step over to the next segment."""
        number = start.segment
        end = until.offset if number == until.segment else None
        try:
            data = self._storage.read(number, start.offset, end)
        except FileNotFoundError:
            data = b""
        found = scan(data[:READ_BYTES], start)
        if not found.entries:
            found = scan(data, start)  # perhaps behind what cannot be read
        if found.entries:
            batch = Batch(found.entries, found.end)
            load(self._engine, self._ledger, batch)
            return batch
        later = [other for other in self._storage.numbers() if number < other <= until.segment]
        return Batch((), Position(later[0], 0) if later else max(start, until))

    async def _clean(self) -> None:
        now = self._unix_time()
        if self._retention_s is None or (self._cleaned_at is not None and now < self._cleaned_at + RETENTION_EVERY_S):
            return
        num_deleted = await _in_thread(partial(delete_old, self._engine, self._ledger, now - self._retention_s))
        self._cleaned_at = now
        if num_deleted:
            log.info("ledger.retention", num_deleted=num_deleted)

    def _fail(self, error: Exception) -> None:
        why = reason(error)
        if self.trouble is None:
            log.error("ledger.database_away", why=why, help="records wait in the write-ahead file until it is back")
        self.trouble = why


async def _in_thread(work: Callable[[], T]) -> T:
    """A database that does not answer must not keep the server from ending."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
