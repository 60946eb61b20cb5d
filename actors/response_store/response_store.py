"""The response store of a running server: opened before its runtime, closed after it.

Every call runs in a worker thread, one at a time, since there is one connection. A call that takes longer than CALL_S
is given up; until its thread returns, further calls fail at once, so that a disk that hangs delays nobody for long.

What must always hold: a call that was given up changes nothing, unless its commit is what hangs, and then leaves no
object that nobody will end; a database that fails ends no task: its callers get StoreUnavailable; deleted text is gone
from the file and its log by the time that a deletion returns, or at the latest RETRY_S after the disk works again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple

import attrs
import structlog
import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..threads import run_in_thread
from .object_tables import Call, ObjectTables
from .store_file import NAME, open_file
from .stored import Kind, NewObject, StoreError, StoreFull, StoreUnavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = structlog.get_logger("quipu.responses")

CALL_S: Final = 5.0
EXPIRE_EVERY_S: Final = 30.0
RETRY_S: Final = 5.0
"""How long after a failure a call is tried again that is due anyway."""
CLOSING_S: Final = 5.0
"""How long a stopping server waits for what is being written."""


@attrs.frozen(kw_only=True)
class StoreConfig:
    data_dir: Path
    ttl_s: float
    """How long an object is kept after it was completed or changed."""
    max_bytes: int = 1 << 30
    max_background: int = 64
    """Background responses of one tenant that are being generated."""


class ResponseStore:
    def __init__(self, tables: ObjectTables, config: StoreConfig, nursery: trio.Nursery) -> None:
        self._tables = tables
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._nursery = nursery
        self._stuck: Call | None = None
        self._leftovers: dict[str, tuple[str, Kind]] = {}
        """Objects that could not be completed, to be deleted when the database works again."""
        self.config = config
        self.trouble: str | None = None
        """Why the last call failed; None if it did not."""
        self.num_unstored = 0
        """Answers that were to be stored and could not be."""
        self.used_bytes = 0
        self.num_running: Callable[[], int] = lambda: 0
        """Returns how many background responses are being generated."""

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was given up is still in its thread."""
        return self._stuck is not None

    async def wait_unused(self) -> bool:
        """Wait until no thread uses the database any more: also none whose caller was cancelled. False: one hangs."""
        with trio.move_on_after(0.0 if self.is_stuck else CLOSING_S, shield=True):
            async with self._one_at_a_time:
                return True
        return False

    @property
    def num_leftovers(self) -> int:
        """Objects that are to be deleted soon, since they will not be completed."""
        return len(self._leftovers)

    @property
    def num_evicted(self) -> int:
        return self._tables.space.num_evicted

    @property
    def num_expired(self) -> int:
        return self._tables.space.num_expired

    async def call(self, work: Callable[[ObjectTables, *Ts], T], *args: *Ts) -> T:
        """Run a method of the tables. Raises StoreUnavailable, and what the method raises for its caller."""
        if self._stuck is not None:
            raise StoreUnavailable("the response store does not respond")
        call = Call()
        with trio.move_on_after(CALL_S):
            try:
                result = await run_in_thread(
                    self._run, call, work, *args, limiter=self._one_at_a_time, abandon_on_cancel=True
                )
            except (sqlite3.Error, OSError, MemoryError) as error:
                raise self._failed(str(error) or type(error).__name__) from None
            except StoreUnavailable as error:
                if not isinstance(error, StoreFull):
                    self._failed(str(error))
                raise
            if self.trouble is not None:
                self.trouble = None
                log.info("response_store.back")
            return result
        call.is_abandoned = True
        if call.has_begun:
            for new in args:
                if isinstance(new, NewObject):  # stored all the same if its commit is what hangs
                    self._leftovers[new.object_id] = (new.tenant, new.kind)
            self._stuck = call
            if call.has_ended:  # in between: the thread looks at both in the opposite order
                self._stuck = None
        raise self._failed("it does not respond")

    def _run(self, call: Call, work: Callable[[ObjectTables, *Ts], T], *args: *Ts) -> T:
        """Run one call in its thread."""
        call.has_begun = True
        try:
            if call.is_abandoned:
                raise StoreUnavailable("the response store was too slow")
            self._tables.call = call
            result = work(self._tables, *args)
            self.used_bytes = self._tables.space.used_bytes
            return result
        finally:
            call.has_ended = True
            if self._stuck is call:
                self._stuck = None

    def _failed(self, why: str) -> StoreUnavailable:
        if self.trouble is None:
            log.error("response_store.unavailable", why=why, help="answers are given, but not stored")
        self.trouble = why
        return StoreUnavailable(f"the response store is unavailable: {why}")

    def note_unstored(self, why: str) -> None:
        """Note that an answer was given that should have been stored."""
        self.num_unstored += 1
        log.warning("response_store.not_stored", why=why)

    def discard(self, tenant: str, kind: Kind, object_id: str) -> None:
        """Delete an object soon, without waiting: it was begun, and will not be completed."""
        self._leftovers[object_id] = (tenant, kind)
        self.start_soon(self._delete_leftovers)

    def start_soon(self, task: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Start a task that may outlive the request that starts it. It must not raise."""
        self._nursery.start_soon(task, *args)

    async def start(self, task: Callable[..., Awaitable[object]], *args: Any) -> Any:
        """Start such a task, and return what it says once it has started."""
        return await self._nursery.start(task, *args)

    async def _delete_leftovers(self) -> None:
        while self._leftovers:
            object_id, (tenant, kind) = next(iter(self._leftovers.items()))
            try:
                await self.call(ObjectTables.delete, tenant, kind, object_id)
            except StoreUnavailable:
                return  # `keep_house` tries again
            self._leftovers.pop(object_id, None)

    async def keep_house(self) -> None:
        """Delete what has expired, and what could not be deleted before, for ever."""
        while True:
            try:
                while await self.call(ObjectTables.expire):
                    pass
                await self._delete_leftovers()
                pause_s = min(EXPIRE_EVERY_S, self.config.ttl_s / 4)
            except StoreUnavailable:
                pause_s = RETRY_S
            await trio.sleep(RETRY_S if self._leftovers else pause_s)


class StoreGauges(Collector):
    """The store's metrics, read when they are collected."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        store = self._store
        yield _gauge("up", "1: responses are stored; 0: the last attempt failed.", store.trouble is None)
        yield _gauge("bytes", "Size of what is stored.", store.used_bytes)
        yield _gauge("background_responses", "Background responses that are being generated.", store.num_running())
        yield _counter("evicted", "Stored objects that were deleted for room.", store.num_evicted)
        yield _counter("expired", "Stored objects that were deleted at the end of their time.", store.num_expired)
        yield _counter("unstored", "Answers that were to be stored and could not be.", store.num_unstored)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quipu:response_store_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"quipu:response_store_{name}", text, value=float(value))


@asynccontextmanager
async def open_store_if(config: StoreConfig | None) -> AsyncIterator[ResponseStore | None]:
    """Keep a response store if there is a config."""
    if config is None:
        yield None
    else:
        async with open_store(config) as store:
            yield store


@asynccontextmanager
async def open_store(
    config: StoreConfig,
    *,
    unix_time: Callable[[], float] = time.time,
    open_database: Callable[[Path], sqlite3.Connection] = open_file,
) -> AsyncIterator[ResponseStore]:
    """Keep a response store until the block is left. Raises StoreError if it cannot be kept as configured."""
    path = config.data_dir / NAME
    connection = await run_in_thread(open_database, path)
    store: ResponseStore | None = None
    try:
        tables = ObjectTables(connection, ttl_s=config.ttl_s, max_bytes=config.max_bytes, unix_time=unix_time)
        async with trio.open_nursery() as nursery:
            store = ResponseStore(tables, config, nursery)
            try:
                num_lost = await store.call(ObjectTables.recover)
            except StoreUnavailable as error:
                raise StoreError(f"cannot use the response store {path}: {error}") from None
            if num_lost:
                log.warning(
                    "response_store.recovered", num_responses=num_lost, help="their server died; marked as failed"
                )
            async with trio.open_nursery() as house:
                house.start_soon(store.keep_house)
                try:
                    yield store
                finally:
                    house.cancel_scope.cancel()
                    nursery.cancel_scope.deadline = trio.current_time() + CLOSING_S
    finally:
        if store is None or await store.wait_unused():
            connection.close()
