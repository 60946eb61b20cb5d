"""Where usage reports come from: the ledger, read and rendered in processes of their own.

`LedgerUsage` has reports (`reports.py`) made by processes (`report_process.py`), which are started when needed and end
when idle for long.

What must always hold: one report is made at a time; tenants take turns, of each a bounded number of reports waits, and
each has a deadline; what a client no longer waits for is interrupted; if the ledger cannot be read, the reason is in
the log but not in the response, a 503; no process outlives the block of `open_usage`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import attrs
import orjson
import structlog
import trio

from quipu.actors.fleet.processes.idle_processes import IdleProcesses
from quipu.actors.ledger.reading import LedgerRecord, Query
from quipu.actors.threads import outlive_shortages

from ...http.turns import FairTurns, TooManyWaiting
from ...request.errors import APIError, internal, invalid, unavailable
from ...request.principal import Principal
from .report_process import Answered, ReportProcess, ReportProcessGone
from .report_worker import Answer, Where
from .reports import FirstRecord, Report, record_in

READ_S = 30.0
"""How long a client waits for a report, including the wait for a process."""
NUM_PROCESSES = 1
"""Each takes some 60 MiB, and a processor while it makes a report."""
MAX_WAITING = 16
"""Reports of one tenant."""
IDLE_S = 60.0
"""How long a process may be idle. Starting one takes half a second of a processor."""

_log = structlog.get_logger("quipu.web")


class UsageSource(Protocol):
    """A source of usage data."""

    async def report(self, report: Report, party: Hashable) -> Sequence[bytes]:
        """Return the body of a report, in pieces that may each be sent at once. The parties that ask take turns.

        Raises APIError: 503 if the ledger cannot be read, 400 for what the report refuses.
        """
        ...


async def find_record(source: UsageSource, request_id: str, principal: Principal) -> LedgerRecord | None:
    """Return the record of a request that the principal may see. Raises APIError (503)."""
    query = record_query(request_id, principal)
    return None if query is None else record_in(b"".join(await source.report(FirstRecord(query), principal.party)))


def record_query(request_id: str, principal: Principal) -> Query | None:
    """Return the query for a record that the principal may see. None: no record has such an id."""
    if not request_id.isprintable():  # ids are, and not every database accepts others
        return None
    return Query(request_ids=(request_id,), tenants=() if principal.is_admin else (principal.tenant,))


@attrs.define(eq=False)
class _Job:
    report: Report
    party: Hashable
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    done: trio.Event = attrs.field(factory=trio.Event)
    answered: Answered | None = None
    why: str = ""
    """Why there is no answer."""
    is_refused: bool = False
    """Too many of its party wait."""


@asynccontextmanager
async def open_usage(
    data_dir: Path,
    url: str | None = None,
    *,
    num_processes: int = NUM_PROCESSES,
    max_waiting: int = MAX_WAITING,
    read_s: float = READ_S,
) -> AsyncIterator[LedgerUsage]:
    """Open a source that reads the ledger until the block is left; `url` is as in LedgerConfig."""
    async with trio.open_nursery() as nursery:
        usage = LedgerUsage(Where(data_dir, url), num_processes, max_waiting, read_s)
        await nursery.start(usage.run)
        yield usage
        nursery.cancel_scope.cancel()


class LedgerUsage:
    def __init__(self, where: Where, num_processes: int, max_waiting: int, read_s: float) -> None:
        self._where = where
        self._turns = FairTurns(num_processes, max_waiting=max_waiting)
        self._read_s = read_s
        self.num_open = 0
        """Reports that are being made, wait for that, or are being interrupted."""
        self._idle: IdleProcesses[ReportProcess] = IdleProcesses(IDLE_S)
        self._nursery: trio.Nursery | None = None

    @property
    def idle_process_ids(self) -> list[int]:
        return self._idle.ids

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep processes as long as they are needed, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await outlive_shortages(self._idle.run, "idle report processes")
        finally:  # once no task can put one back
            await self._idle.end_all()

    async def report(self, report: Report, party: Hashable) -> Sequence[bytes]:
        assert self._nursery is not None
        job = _Job(report, party, why=f"no answer within {self._read_s:g} s")
        self.num_open += 1
        self._nursery.start_soon(self._serve, job)
        try:
            with trio.move_on_after(self._read_s):
                await job.done.wait()
        finally:
            job.scope.cancel()
        if job.is_refused:
            raise unavailable("Too many usage reports are being made. Try again later.", "too_many_reports")
        if job.answered is None:
            raise _away(job.why)
        return _body_of(job.answered)

    async def _serve(self, job: _Job) -> None:
        try:
            with job.scope:
                async with self._turns.turn(job.party):
                    await self._make(job)
        except TooManyWaiting:
            job.is_refused = True
        finally:
            self.num_open -= 1
            job.done.set()

    async def _make(self, job: _Job) -> None:
        """Have a report made by an idle process, or by a new one if there is none or it has died while idle."""
        try:
            idle = await self._idle.take()
            if idle is not None:
                with suppress(ReportProcessGone):
                    return await self._make_by(idle, job)
            await self._make_by(await ReportProcess.start(self._where), job)
        except (OSError, MemoryError, ReportProcessGone) as error:
            job.why = str(error) or type(error).__name__

    async def _make_by(self, process: ReportProcess, job: _Job) -> None:
        try:
            job.answered = await process.make(job.report)
        finally:
            await self._idle.put_back(process)


def _body_of(answered: Answered) -> Sequence[bytes]:
    if answered.kind is Answer.MADE:
        return answered.pieces
    text = b"".join(answered.pieces)
    if answered.kind is Answer.REFUSED:
        raise invalid(*orjson.loads(text))
    why = text.decode(errors="replace")
    if answered.kind is Answer.AWAY:
        raise _away(why)
    _log.error("usage.report_failed", error=why)
    raise internal()


def _away(why: str) -> APIError:
    _log.warning("usage.ledger_away", why=why, help="reports are answered 503; nothing is lost")
    return unavailable("The usage ledger is unavailable. Try again later.", "ledger_unavailable")
