"""Runs the batches of a server, and keeps its files: what the endpoints call, and the tasks behind it.

    check      a new batch's input file is read, line by line
    feed       lines of all batches, tenants in turn, `concurrency` at once (`line_runner.py`)
    store      what lines have led to, many in one transaction
    finish     the files of results, when no line is left
    clean up   files and batches whose time is over

The store blocks and is called in threads, one call at a time. After a start, batches continue where they were: a result
without its usage record is forgotten, and its line run again.

What must always hold: a line runs once at a time; a batch ends once; whatever a full disk keeps from being written is
tried again, and no client waits for it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar, TypeVarTuple

import attrs
import structlog
import trio
from hypercorn.typing import ASGIFramework

from quipu.actors.threads import run_in_thread

from .batch_refusals import add_batch, storage_failed
from .batch_store import BatchStore
from .batch_values import Batch, BatchLimits, Line, LineResult, Status, copy_of
from .file_checking import check_file
from .finishing import clear, delete_expired, finish
from .insisting import FindRecorded, insist, insist_on_ledger
from .line_check import read_line
from .line_runner import run_line
from .open_batches import OpenBatch, OpenBatches
from .store_database import BatchStoreError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RETRY_S: Final = 1.0
"""After an error of the disk."""
CLEAN_UP_S: Final = 60.0
STOP_S: Final = 5.0
"""How long running lines may take to end when the server stops, after it has failed what was open."""

log = structlog.get_logger("quipu.batches")


@attrs.define(eq=False)
class _News:
    """What is to be stored next."""

    kept: list[LineResult] = attrs.field(factory=list)
    when_stored: list[Callable[[], object]] = attrs.field(factory=list)
    done: list[tuple[str, int]] = attrs.field(factory=list)
    batches: dict[str, Batch] = attrs.field(factory=dict)


class BatchService:
    def __init__(
        self,
        store: BatchStore,
        limits: BatchLimits,
        find_recorded: FindRecorded,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.limits = limits
        self._find_recorded = find_recorded
        self._unix_time = unix_time
        self._limiter = trio.CapacityLimiter(1)
        self._live: dict[str, Batch] = {}
        """All that have not ended, by id, with their latest counts."""
        self._open = OpenBatches()
        self._news = _News()
        self._has_news = trio.Event()
        self._slots = trio.Semaphore(limits.concurrency)
        self._nursery: trio.Nursery | None = None
        self._app: ASGIFramework | None = None
        self.retry_s, self.stop_s = RETRY_S, STOP_S
        self._is_stopping = False
        self._num_running = 0
        self._line_ended = trio.Event()

    @property
    def now(self) -> int:
        return int(self._unix_time())

    async def call(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the store in a thread for a client. Raises APIError if the disk or the database fails."""
        try:
            return await self._call(call, *args)
        except (OSError, sqlite3.Error) as error:
            raise storage_failed(error) from None

    async def _call(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await run_in_thread(call, *args, limiter=self._limiter)

    @asynccontextmanager
    async def serving(self, app: ASGIFramework) -> AsyncIterator[None]:
        """Run batches with an application until the block is left. Raises BatchStoreError."""
        self._app = app
        try:
            await self._call(self.store.clean_up)
            earlier = await self._call(self.store.open_batches)
        except (OSError, sqlite3.Error) as error:
            raise BatchStoreError(f"the stored batches cannot be read: {error}") from None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._store_news)
            nursery.start_soon(self._clean_up)
            nursery.start_soon(self._feed)
            for batch in earlier:
                self._live[batch.id] = batch
                nursery.start_soon(self._resume, batch)
            try:
                yield
            finally:
                self._is_stopping = True
                with trio.move_on_after(self.stop_s, shield=True):
                    while self._num_running:
                        self._line_ended = trio.Event()
                        await self._line_ended.wait()
                nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ for the endpoints

    async def add(self, batch: Batch) -> None:
        """Store a batch, and begin to check and run it. Raises APIError."""
        assert self._nursery is not None
        await self.call(add_batch, self.store, self.limits, batch)
        self._live[batch.id] = batch
        self._nursery.start_soon(self._check, batch)

    async def cancel(self, batch: Batch) -> Batch:
        """Run no more lines of a batch; those that run end as they would. Raises APIError if that cannot be stored."""
        batch = self.current(batch)
        if batch.cancelling_at is None and batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            batch.status, batch.cancelling_at = Status.CANCELLING, self.now
        if batch.status is Status.CANCELLING and batch.id in self._live:  # again, if it could not be stored before
            try:
                await self.call(self.store.save, copy_of(batch))
            finally:
                if (opened := self._open.find(batch.id)) is not None:
                    self._may_finish(opened)
        return batch

    def current(self, batch: Batch) -> Batch:
        """Return a stored batch with its latest counts."""
        return self._live.get(batch.id, batch)

    # ------------------------------------------------------------ its tasks

    async def _resume(self, batch: Batch) -> None:
        """Continue a batch of an earlier server."""
        if batch.in_progress_at is None:
            await self._check(batch)
            return
        await self._settle(batch)
        self._begin(OpenBatch(batch))

    async def _settle(self, batch: Batch) -> None:
        """Find out which results count that were stored before an earlier server ended."""
        kept = await self._insist(self.store.kept, batch.id)
        ids = [result.request_id for result in kept if result.request_id is not None]
        recorded = await insist_on_ledger(self._find_recorded, ids, self.retry_s) if ids else ()
        lost = [r for r in kept if r.request_id is not None and r.request_id not in recorded]
        if lost:
            log.warning("batch.lines_repeated", batch_id=batch.id, num_lines=len(lost), help="the server had died")
            for result in lost:
                batch.uncount(result.kind, result.usage)
            await self._insist(self.store.take_back, batch, [result.number for result in lost])
        done = [(batch.id, result.number) for result in kept if result not in lost]
        await self._insist(self.store.commit, (), done, ())

    async def _check(self, batch: Batch) -> None:
        """Read the lines of a batch, and begin to run them or fail it."""
        check = await insist(partial(check_file, batch, self.store.folder, self.limits), self.retry_s)
        if batch.cancelling_at is not None:
            batch.status, batch.cancelled_at = Status.CANCELLED, self.now
            await self._insist(self.store.save, batch)
            del self._live[batch.id]
        elif check.errors:
            batch.errors = check.errors
            batch.status, batch.failed_at = Status.FAILED, self.now
            await self._insist(self.store.save, batch)
            del self._live[batch.id]
        else:
            batch.status, batch.in_progress_at = Status.IN_PROGRESS, self.now
            batch.num_lines, batch.model = len(check.lines), check.model
            await self._insist(self.store.begin, batch, check.lines)
            self._begin(OpenBatch(batch))
        log.info("batch.checked", batch_id=batch.id, status=batch.status, num_lines=batch.num_lines)

    def _begin(self, opened: OpenBatch) -> None:
        self._open.add(opened)
        self._may_finish(opened)

    async def _feed(self) -> None:
        assert self._nursery is not None
        while True:
            await self._slots.acquire()
            opened = await self._open.wait_next(self._fill, self._is_wanted, self._may_finish)
            line = opened.lines.popleft()
            opened.num_running += 1
            self._num_running += 1
            self._nursery.start_soon(self._run, opened, line)

    async def _fill(self, opened: OpenBatch, after: int, limit: int) -> list[Line]:
        return await self._insist(self.store.pending, opened.batch.id, after, limit)

    async def _run(self, opened: OpenBatch, line: Line) -> None:
        assert self._app is not None
        try:
            read = partial(self._read, opened.batch)
            keep = partial(self._keep, opened.batch)
            is_wanted = partial(self._is_wanted, opened)
            if await run_line(self._app, opened.batch, line, read, keep, is_wanted):
                self._news.done.append((line.batch_id, line.number))
                self._has_news.set()
        finally:
            opened.num_running -= 1
            self._num_running -= 1
            self._line_ended.set()
            self._slots.release()
            self._may_finish(opened)

    def _is_wanted(self, opened: OpenBatch) -> bool:
        return not self._is_stopping and opened.batch.cancelling_at is None and opened.batch.expires_at > self.now

    async def _read(self, batch: Batch, line: Line) -> bytes:
        """Return the body of a line. Raises BadLine if its file is gone, or has changed."""
        read = partial(self.store.folder.read_if_there, batch.input_file_id, line.start, line.length)
        return read_line(await insist(partial(run_in_thread, read), self.retry_s), batch.endpoint).body

    def _keep(self, batch: Batch, result: LineResult, when_stored: Callable[[], object]) -> None:
        """Store a result with the next transaction."""
        batch.count(result.kind)
        batch.usage.add(result.usage)
        news = self._news
        news.kept.append(result)
        news.when_stored.append(when_stored)
        news.batches[batch.id] = batch
        self._has_news.set()

    async def _store_news(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news = trio.Event()
            news, self._news = self._news, _News()
            batches = [copy_of(batch) for batch in news.batches.values()]  # later results change them meanwhile
            await self._insist(self.store.commit, news.kept, news.done, batches)
            for call in news.when_stored:
                call()

    def _may_finish(self, opened: OpenBatch) -> None:
        """Finish a batch if none of its lines runs or is to be run."""
        assert self._nursery is not None
        if opened.num_running or opened.is_finishing or self._is_stopping:
            return
        if opened.is_exhausted or not self._is_wanted(opened):
            opened.is_finishing = True
            self._nursery.start_soon(self._finish, opened)

    async def _finish(self, opened: OpenBatch) -> None:
        batch = await finish(opened.batch, self.store, self._insist, self.now, self.limits.file_ttl_s)
        self._open.remove(opened)
        del self._live[batch.id]
        await clear(batch, self.store, self._insist)
        log.info("batch.ended", batch_id=batch.id, status=batch.status, num_succeeded=batch.num_succeeded)

    async def _clean_up(self) -> None:
        """Delete what is expired, and end batches whose time is over."""
        while True:
            await trio.sleep(CLEAN_UP_S)
            await self.clean_up()

    async def clean_up(self) -> None:
        for opened in self._open:
            self._may_finish(opened)
        await delete_expired(self.store, self._insist, self.now, self.limits.file_ttl_s)

    async def _insist(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the store, again and again if the disk refuses."""
        return await insist(partial(self._call, call, *args), self.retry_s)
