"""The ledger of a running server: opened before its runtime, closed after it.

    lock the folder ─▶ recover (recovery.py) ─▶ first segment, `start`, closing records for dead servers ─▶ serve
    serve ─▶ `stop` with the counters' values ─▶ sync ─▶ load what is left, for a bounded time

What must always hold: no request is admitted before the requests of dead servers are closed; an unreachable database
does not keep the server from starting, serving or stopping.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import sqlalchemy as sa
import structlog
import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..messages.outcomes import Fault, Outcome
from ..threads import run_in_thread
from .database import LedgerError, make_engine, migrate, reason, sqlite_url
from .durable_journal import DurableJournal
from .entries import MAX_LINE_BYTES, Chain
from .folder import LedgerFolder
from .loader import Loader
from .preallocated_segments import PreallocatedSegments
from .recovery import Recovered, recover
from .retries import RetryIndex
from .segment_files import BEGINNING, DiskStorage, Storage
from .unadmitted import LIMITED, UnadmittedBudget
from .webhook import Webhook, WebhookConfig
from .webhook_queue import WebhookQueue

log = structlog.get_logger("quipu.ledger")

DAY_S: Final = 86_400.0
FIRST_CONNECT_S: Final = 8.0
"""How long a start waits for the database before it continues without it."""


@attrs.frozen
class LedgerConfig:
    data_dir: Path
    url: str | None = None
    """None: SQLite in the data directory."""
    fsync: bool = False
    """A client sees the end of its response only when its record would survive a power loss."""
    segment_bytes: int = 8 << 20
    idempotency_window_s: float = DAY_S
    max_idempotency_keys: int = 10_000
    """Per tenant. The oldest are forgotten first; retries of them are not recognized."""
    max_refusal_records: int = 500
    """Records of requests that were never admitted, written per tenant and hour; the rest are only counted."""
    retention_days: float = 0.0
    """0: records are kept forever."""
    version: str = ""
    """quipu's version, for the `start` entry."""
    webhook: WebhookConfig | None = None
    """Where each record is sent."""


@attrs.define(eq=False)
class Ledger:
    journal: DurableJournal
    loader: Loader
    server: str
    num_recovered: int
    segment_bytes: int
    data_dir: Path
    webhook: Webhook | None = None
    counters: Callable[[], Mapping[str, float]] | None = None
    """Called at the end for the counters' last values, for `quipu ledger reconcile`."""

    @property
    def trouble(self) -> str | None:
        """Why no request is admitted; None if all is well."""
        return self.journal.trouble


class LedgerGauges(Collector):
    """The ledger's metrics, read when they are collected."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        journal, loader = self._ledger.journal, self._ledger.loader
        info = GaugeMetricFamily("quipu:ledger_info", "This server's id in the ledger.", labels=["server"])
        info.add_metric([self._ledger.server], 1.0)
        yield info
        yield _gauge("ledger_writable", "1: records can be written; 0: none is admitted.", journal.trouble is None)
        yield _gauge("ledger_open_entries", "Admitted requests whose closing record is not written.", journal.num_open)
        yield _gauge("ledger_held_back", "Records of unadmitted requests that wait for room.", journal.num_held_back)
        start, end = loader.position or BEGINNING, journal.durable
        behind = (end.segment - start.segment) * self._ledger.segment_bytes + end.offset - start.offset
        yield _gauge("ledger_unloaded_bytes", "Approximate size of what is not in the database yet.", behind)
        about = "Requests without a record, by outcome: never admitted, and beyond their tenant's budget."
        suppressed = CounterMetricFamily("quipu:usage_records_suppressed", about, labels=["outcome"])
        for outcome in LIMITED:
            suppressed.add_metric([outcome], float(journal.num_suppressed.get(outcome, 0)))
        yield suppressed
        yield _gauge("ledger_database_up", "1: records are loaded; 0: the database is down.", loader.trouble is None)
        with suppress(OSError):
            disk = shutil.disk_usage(self._ledger.data_dir)
            yield _gauge("data_dir_free_bytes", "Free space of the disk with the data directory.", disk.free)
            yield _gauge("data_dir_size_bytes", "Size of that disk.", disk.total)
        if (webhook := self._ledger.webhook) is not None:
            yield _gauge("usage_webhook_up", "1: events are delivered; 0: none at present.", webhook.trouble is None)
            yield _counter("usage_webhook_delivered", "Records delivered to the webhook.", webhook.num_delivered)
            yield _counter("usage_webhook_given_up", "Records that the webhook refused.", webhook.num_given_up)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quipu:{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"quipu:{name}", text, value=float(value))


@asynccontextmanager
async def open_ledger(
    config: LedgerConfig, *, storage: Storage | None = None, unix_time: Callable[[], float] = time.time
) -> AsyncIterator[Ledger]:
    """Keep a ledger until the block is recovered. Raises LedgerError if it cannot be kept as configured."""
    if config.segment_bytes < 4 * MAX_LINE_BYTES:
        raise LedgerError(f"--ledger-segment-bytes must be at least {4 * MAX_LINE_BYTES}")
    folder = LedgerFolder(config.data_dir)
    with folder.locked():
        try:
            folder.make_private()
            about = folder.open_for_writing(config.url)
            storage = storage or DiskStorage(folder.path)
            retries = RetryIndex(config.idempotency_window_s, config.max_idempotency_keys)
            recovered = recover(storage, retries)
            server = f"srv-{secrets.token_hex(8)}"
            segments = PreallocatedSegments(
                storage, segment_bytes=config.segment_bytes, next_number=recovered.next_segment
            )
            unadmitted = UnadmittedBudget(config.max_refusal_records)
            journal = DurableJournal(
                segments, Chain(server), retries, unadmitted, fsync=config.fsync, unix_time=unix_time
            )
            _begin(journal, recovered, config.version, unix_time())
            for number in recovered.empty_segments:
                storage.delete(number)
        except OSError as error:
            raise LedgerError(f"cannot keep a ledger in {config.data_dir}: {error.strerror or error}") from None
        engine = make_engine(config.url or sqlite_url(config.data_dir), durable=config.fsync)
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
        ledger = Ledger(journal, loader, server, len(recovered.open_records), config.segment_bytes, config.data_dir)
        try:
            if config.webhook is not None:
                queue = WebhookQueue.open(engine, folder.path, about.ledger, server)
                ledger.webhook = Webhook(config.webhook, queue)
            async with trio.open_nursery() as nursery:
                if ledger.webhook is not None:
                    nursery.start_soon(ledger.webhook.run)
                nursery.start_soon(journal.run)
                nursery.start_soon(loader.run)
                yield ledger
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await _end(ledger)
            engine.dispose()


def _begin(journal: DurableJournal, recovered: Recovered, version: str, now: float) -> None:
    """Write this server's first entry and the closing records of dead servers. Raises OSError."""
    journal.start({"version": version, "after": recovered.after})
    for record in recovered.open_records:
        failed = attrs.evolve(record, outcome=Outcome.FAILED, finish_reason=None, closed_at=now, fault=Fault.RECOVERED)
        journal.recover(failed)
    if recovered.open_records:
        log.warning(
            "ledger.recovered", num_requests=len(recovered.open_records), help="their server died; closed as failed"
        )
    journal.flush()
    if journal.trouble:
        raise OSError(journal.trouble)


async def _first_connect(engine: sa.Engine) -> None:
    """Raise LedgerError early for a database that cannot be used; an unreachable one does not prevent the start."""
    with trio.move_on_after(FIRST_CONNECT_S):
        try:
            await run_in_thread(migrate, engine, abandon_on_cancel=True)
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
