"""The usage accountant: one account a request, two independent entries for every prompt position.

Hears of a request's opening and leaving, of its prompts, of every step, of what its client was given, and of an
engine's death, in one inbox. Writes what it hears into the daybook first, then does what is due (`effects.py`), then
passes the step's tokens on: so `Admitted` numbers reach the client's outlet before its first token. Every rule of the
numbers is in `account.py`.

    open ──▶ prompted ──▶ admitted ──▶ every sequence: Terminal (engine) and Completed (detokenizer) ──▶ closed
                └─ refused, failed, left: what was submitted is ended first, then the same

It keeps nothing: everything is in the daybook and the metrics, which outlive it. A new accountant begins with the
message that its predecessor died of.

Accounts of hundreds of sequences take milliseconds each, and a report may concern many: others run between them.

What must always hold: no account outlives its request and its sequences; a message is written down once, whatever
becomes of the accountant.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import trio

from ..channel import Receiver, Sender
from ..messages.accountant import Completed, EngineDied, Left, OpenAccount, Prompted, Refused, Side, StepReport
from ..messages.block_manager import CacheMiss, MissReason
from ..messages.detokenizer import Tokens
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..request_desk.desk import Registry
from .account import Ended, Estimation, FirstToken, Gap, Kept, Revision, Written
from .effects import Reckoning
from .entry_store import AccountantMessage, Daybook, Page, Pending
from .journal import Journal
from .metrics import Metrics
from .prompt_account import Admission

log = structlog.get_logger()

SLICE_S = 0.002
"""How long accounts may be settled in a row."""


class Accountant:
    def __init__(
        self,
        daybook: Daybook,
        metrics: Metrics,
        registry: Registry,
        journal: Journal,
        detokenizer: Sender[Tokens],
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._daybook = daybook
        self._metrics = metrics
        self._registry = registry
        self._journal = journal
        self._detokenizer = detokenizer
        self._unix_time = unix_time
        self._reckoning = Reckoning(daybook, metrics, registry, journal)
        self._slice_end = 0.0

    async def run(self, inbox: Receiver[AccountantMessage]) -> None:
        """Keep the books until cancelled."""
        pending = self._daybook.pending
        while True:
            while pending:
                await self._hear(pending[0])
                pending.popleft()
                await self._let_others_run()
            self._journal.flush()
            messages = await inbox.receive_all()
            self._slice_end = time.perf_counter() + SLICE_S
            now = trio.current_time()
            pending.extend(Pending(message, now) for message in messages)

    async def _hear(self, pending: Pending) -> None:
        match pending.message:
            case StepReport():
                await self._on_report(pending, pending.message)
            case EngineDied():
                await self._on_engine_died(pending, pending.message)
            case _:
                page = self._write(pending)
                if page is not None:
                    self._reckoning.settle(page, pending.at)

    def _write(self, pending: Pending) -> Page | None:
        """Write down a message that concerns one request; the request's page, where it is open."""
        daybook, message = self._daybook, pending.message
        is_new, pending.is_written = not pending.is_written, True
        match message:
            case OpenAccount():
                if is_new:
                    daybook.open(message, self._unix_time())
                    self._metrics.open_accounts.set(daybook.num_open_accounts)
                return None
            case Prompted():
                if is_new:
                    daybook.prompted(message)
                return None
            case Completed() | Left() | Refused():
                page = daybook.pages.get(message.request_id)
                if page is None or not is_new:
                    return page  # None: closed before its client was answered
                match message:
                    case Completed():
                        page.completed[message.sequence_id] = message
                    case Left():
                        page.left = True
                        page.awaited = frozenset(message.submitted_ids)
                    case Refused():
                        page.fail(message.error)
                return page
            case _:
                raise TypeError(f"{type(message).__name__} concerns more than one request")

    # ------------------------------------------------------------ one step

    async def _on_report(self, pending: Pending, report: StepReport) -> None:
        if not pending.is_written:
            pending.is_written = True
            if not self._is_next(report):
                pending.is_timed = pending.is_passed_on = pending.is_shown = True
                return
            try:
                self._write_report(report, pending.at)
            except ValueError as error:
                log.error("report.unreadable", number=report.number, error=str(error))
                self._write_gap()
        await self._settle(report.admitted_ids, pending.at)
        await self._settle(report.revised_ids, pending.at)
        await self._settle(self._first_tokens(report), pending.at)
        if report.token_ids and not pending.is_timed:
            pending.is_timed = True
            self._time_tokens(report, pending.at)
        if (report.token_ids or report.scores) and not pending.is_passed_on:
            await self._detokenizer.send(
                Tokens(
                    report.token_sequence_ids,
                    report.token_ids,
                    report.ended_ids,
                    report.ended_reasons,
                    report.scores,
                )
            )
            pending.is_passed_on = True
        if not pending.is_shown:
            pending.is_shown = True
            self._show(report)
        self._end_those_with_gaps(report)
        await self._settle(report.terminal_ids, pending.at)

    def _is_next(self, report: StepReport) -> bool:
        """Whether a report follows those heard; one that was heard before is not booked again."""
        daybook = self._daybook
        expected = daybook.num_reports + 1
        if report.number < expected:
            log.error("report.repeated", number=report.number, expected=expected)
            return False
        if report.number > expected:
            log.error("report.lost", number=report.number, expected=expected)
            self._write_gap()
        daybook.num_reports = report.number
        return True

    def _write_gap(self) -> None:
        """Whatever the engine holds may have been in what cannot be read any more."""
        for sequence_id, page in self._daybook.by_sequence.items():
            if self._registry.incarnation_of(sequence_id) is not None:
                page.note(sequence_id, Gap())

    def _end_those_with_gaps(self, report: StepReport) -> None:
        """After a Terminal, or when the engine is idle, nothing more can come of a sequence."""
        pages = self._daybook.by_sequence
        is_idle = report.num_running == report.num_waiting == 0
        ids = [i for i in (list(pages) if is_idle else report.terminal_ids) if i in pages and pages[i].has_gap]
        if ids:
            self._registry.give_up(ids)

    async def _settle(self, sequence_ids: list[int], now: float) -> None:
        if not sequence_ids:
            return
        by_sequence = self._daybook.by_sequence
        for page in {id(p): p for i in sequence_ids if (p := by_sequence.get(i)) is not None}.values():
            await self._let_others_run()
            self._reckoning.settle(page, now)

    async def _let_others_run(self) -> None:
        """A checkpoint, where the last one was some time ago."""
        if time.perf_counter() > self._slice_end:
            await trio.lowlevel.checkpoint()
            self._slice_end = time.perf_counter() + SLICE_S

    def _write_report(self, report: StepReport, now: float) -> None:
        """Every entry of the report into its request's page."""
        pages = self._daybook.by_sequence
        self._write_admissions(report, now)
        for sequence_id, num_tokens in zip(report.estimated_ids, report.estimated_tokens, strict=True):
            if (page := pages.get(sequence_id)) is not None:
                page.note(sequence_id, Estimation(num_tokens))
        for sequence_id, tier, num in zip(report.revised_ids, report.revised_tiers, report.revised_tokens, strict=True):
            if (page := pages.get(sequence_id)) is not None:
                page.note(sequence_id, Revision(tier, num))
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=True):
            if (page := pages.get(sequence_id)) is not None:
                page.span(sequence_id, start, end)
        for sequence_id, start, end in zip(report.written_ids, report.written_starts, report.written_ends, strict=True):
            if (page := pages.get(sequence_id)) is not None:
                page.note(sequence_id, Written(start, end))
        for sequence_id, end in zip(report.pinned_ids, report.pinned_ends, strict=True):
            if (page := pages.get(sequence_id)) is not None:
                page.note(sequence_id, Kept(end))
        for sequence_id in dict.fromkeys(self._first_tokens(report)):
            if (page := pages.get(sequence_id)) is not None:
                page.note(sequence_id, FirstToken(now))
        for sequence_id, error, kind in zip(
            report.terminal_ids, report.terminal_errors, report.terminal_error_kinds, strict=True
        ):
            # the one internal error that an engine has for one sequence: a step that held it raised
            is_ours = error is not None and (kind or ErrorKind.INTERNAL) == ErrorKind.INTERNAL
            self._write_terminal(sequence_id, error, kind, Fault.STEP_FAILED if is_ours else None)

    def _write_admissions(self, report: StepReport, now: float) -> None:
        pages = self._daybook.by_sequence
        num = len(report.admitted_ids)
        for sequence_id, number, reused, read, copyable, copied, reason, token, tiers, side in zip(
            report.admitted_ids,
            report.admitted_number,
            report.admitted_reused,
            report.admitted_read,
            report.admitted_copyable or [0] * num,
            report.admitted_copied or [0] * num,
            report.admitted_miss_reasons,
            report.admitted_miss_tokens,
            report.admitted_tiers or [{"device": reused} for reused in report.admitted_reused],
            report.admitted_sides or [Side.PREFILL] * num,
            strict=True,
        ):
            if (page := pages.get(sequence_id)) is not None:
                admission = Admission(
                    number=number,
                    side=Side(side),
                    reused=None if tiers is None else reused,
                    tiers=tiers,
                    read=read,
                    copyable=copyable,
                    copied=copied,
                    miss=CacheMiss(MissReason(reason), token),
                    incarnation=self._registry.incarnation_of(sequence_id),
                    at=now,
                )
                page.note(sequence_id, admission)

    def _first_tokens(self, report: StepReport) -> list[int]:
        """Sequences that have had no token before this step's."""
        timed = self._daybook.last_token_at
        return [i for i in report.token_sequence_ids if i not in timed]

    def _write_terminal(self, sequence_id: int, error: str | None, kind: str | None, fault: Fault | None) -> None:
        self._registry.terminal(sequence_id)
        page = self._daybook.by_sequence.get(sequence_id)
        if page is not None:
            page.note(sequence_id, Ended())
            if error is not None:
                page.fail(RequestError(ErrorKind(kind or ErrorKind.INTERNAL), error), fault)

    def _time_tokens(self, report: StepReport, now: float) -> None:
        last, pages = self._daybook.last_token_at, self._daybook.by_sequence
        num_since: dict[float, int] = {}
        """Tokens by when the one before them came: nearly all of a step have waited for the same step."""
        for sequence_id in report.token_sequence_ids:
            before = last.get(sequence_id)
            if before is not None:
                num_since[before] = num_since.get(before, 0) + 1
            elif sequence_id not in pages:
                continue
            last[sequence_id] = now
        for before, num_tokens in num_since.items():
            self._metrics.inter_token_latency.observe(now - before, num_tokens)

    def _show(self, report: StepReport) -> None:
        metrics = self._metrics
        metrics.num_requests_running.set(report.num_running)
        metrics.num_requests_waiting.set(report.num_waiting)
        metrics.set_blocks(
            total=self._registry.num_usable_blocks,
            free=report.num_free_blocks,
            cached=report.num_cached_blocks,
            pinned=report.num_pinned_blocks,
        )
        if report.num_preempted:
            metrics.num_preemptions.inc(report.num_preempted)
        if report.num_pins_yielded:
            metrics.pins_yielded.inc(report.num_pins_yielded)

    # ------------------------------------------------------------ an engine's death

    async def _on_engine_died(self, pending: Pending, message: EngineDied) -> None:
        if not pending.is_written:
            pending.is_written = True
            self._daybook.num_reports = 0
            for sequence_id in message.held_ids:
                if self._registry.incarnation_of(sequence_id) != message.incarnation:
                    continue  # its Terminal was on its way here when the engine died, and has been booked since
                error = f"the engine died: {message.reason}"
                self._write_terminal(sequence_id, error, ErrorKind.INTERNAL, Fault.ENGINE_DIED)
        metrics, total = self._metrics, self._registry.num_usable_blocks
        metrics.num_requests_running.set(0)
        metrics.num_requests_waiting.set(0)
        metrics.set_blocks(total=total, free=total, cached=0)  # its blocks are gone, and the next one's are all free
        await self._settle(list(message.held_ids), pending.at)
