"""The ledger of a running server: opened before its runtime, closed after it.

    lock the folder ─▶ look back (recovery.py) ─▶ first segment, `start`, closings of earlier lives ─▶ serve
    serve ─▶ `stop` with the counters' sums ─▶ sync ─▶ load what is left, for a bounded time

What must always hold: nothing is admitted before earlier lives are closed; a database that is away keeps nobody from
starting, serving or stopping.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import sqlalchemy as sa
import structlog
import trio

from .database import LedgerError, make_engine, migrate, reason
from .durable_journal import DurableJournal
from .entries import MAX_LINE_BYTES, Chain
from .folder import LedgerFolder
from .loader import Loader
from .preallocated_segments import Room
from .recovery import Left, closing_of, look_back
from .refusals import RefusalBudget
from .retries import RetryIndex
from .segment_files import DiskStorage, Storage

log = structlog.get_logger("quipu.ledger")

DAY_S: Final = 86_400.0
FIRST_CONNECT_S: Final = 8.0
"""How long a start waits for the database; without an answer it starts all the same."""


@attrs.frozen
class LedgerConfig:
    data_dir: Path
    url: str | None = None
    """None: SQLite in the data directory."""
    fsync: bool = False
    """A client hears the end of its response only when its record survives a power loss."""
    segment_bytes: int = 8 << 20
    idempotency_window_s: float = DAY_S
    max_idempotency_keys: int = 10_000
    """Of each tenant; the oldest are forgotten first, and then link nothing."""
    max_refusal_records: int = 500
    """Records of refused requests that are written for each tenant an hour; the rest are counted only."""
    retention_days: float = 0.0
    """0: records are kept for ever."""
    version: str = ""
    """Of quipu, for the `start` entry."""


@attrs.define(eq=False)
class Ledger:
    """Made by `open_ledger`."""

    journal: DurableJournal
    loader: Loader
    server: str
    """This life's incarnation."""
    num_recovered: int
    segment_bytes: int
    counters: Callable[[], Mapping[str, float]] | None = None
    """Asked at the end: the counters' last values, for `quipu ledger reconcile`."""

    @property
    def trouble(self) -> str | None:
        """Why nobody is admitted; None where all is well."""
        return self.journal.trouble


@asynccontextmanager
async def open_ledger(
    config: LedgerConfig, *, storage: Storage | None = None, unix_time: Callable[[], float] = time.time
) -> AsyncIterator[Ledger]:
    """Keep a ledger until the block is left. Raises LedgerError where it cannot be kept as asked."""
    if config.segment_bytes < 4 * MAX_LINE_BYTES:
        raise LedgerError(f"--ledger-segment-bytes must be at least {4 * MAX_LINE_BYTES}")
    folder = LedgerFolder(config.data_dir)
    with folder.locked():
        try:
            folder.tighten()
            about = folder.open_for_writing(config.url)
            storage = storage or DiskStorage(folder.path)
            retries = RetryIndex(config.idempotency_window_s, config.max_idempotency_keys)
            left = look_back(storage, retries)
            server = f"srv-{secrets.token_hex(8)}"
            room = Room(storage, segment_bytes=config.segment_bytes, next_number=left.next_segment)
            refusals = RefusalBudget(config.max_refusal_records)
            journal = DurableJournal(room, Chain(server), retries, refusals, fsync=config.fsync, unix_time=unix_time)
            _begin(journal, left, config.version, unix_time())
            for number in left.empty_segments:
                storage.delete(number)
        except OSError as error:
            raise LedgerError(f"cannot keep a ledger in {config.data_dir}: {error.strerror or error}") from None
        engine = make_engine(config.url or folder.default_url, durable=config.fsync)
        await _first_connect(engine)
        loader = Loader(
            engine,
            about.ledger,
            storage,
            journal,
            retries,
            window_s=config.idempotency_window_s,
            max_keys=config.max_idempotency_keys,
            retention_s=config.retention_days * DAY_S or None,
            unix_time=unix_time,
        )
        ledger = Ledger(journal, loader, server, len(left.open_records), config.segment_bytes)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(journal.run)
                nursery.start_soon(loader.run)
                yield ledger
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _end(ledger)
            engine.dispose()


def _begin(journal: DurableJournal, left: Left, version: str, now: float) -> None:
    """This life's first entry, and the last ones of those before it. Raises OSError."""
    journal.start({"version": version, "after": left.after})
    for record in left.open_records:
        journal.recover(closing_of(record, now))
    if left.open_records:
        log.warning("ledger.recovered", num_requests=len(left.open_records), help="their server died; closed as failed")
    journal.flush()
    if journal.trouble:
        raise OSError(journal.trouble)


async def _first_connect(engine: sa.Engine) -> None:
    """Say early what is wrong with the database for good; that it is away is no reason not to start."""
    with trio.move_on_after(FIRST_CONNECT_S):
        try:
            await trio.to_thread.run_sync(partial(migrate, engine), abandon_on_cancel=True)
        except sa.exc.SQLAlchemyError as error:
            log.warning("ledger.database_away", why=reason(error), help="records wait in the write-ahead file")


async def _end(ledger: Ledger) -> None:
    counters = dict(ledger.counters()) if ledger.counters is not None else None
    ledger.journal.stop({"counters": counters})
    try:
        ledger.journal.close_files()
    except OSError as error:
        log.error("ledger.unwritten", why=str(error), help="the last records are lost")
        return
    if ledger.journal.num_held_back:
        log.error("ledger.record_lost", num_lost=ledger.journal.num_held_back, help="of requests never admitted")
    await ledger.loader.finish()
