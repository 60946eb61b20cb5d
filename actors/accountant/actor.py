"""The usage accountant: keeps one account per request, with two independent entries for every prompt position.

Each message takes one way: its entries are written into the entry store, then the side effects that are due are
applied to the requests that it concerns (`effects.py`). A step's tokens are passed on between the requests that go on
and those that it ended: so `Started` reaches a client's outlet before the first token, and a stopped request has been
given all of its tokens. `account.py` has every rule about the numbers.

    open ──▶ prompted ──▶ admitted ──▶ every sequence: Terminal (engine) and Completed (detokenizer) ──▶ closed
                └─ refused, failed, left: what was submitted is ended first, then the same

It keeps no state of its own: everything is in the entry store and the metrics, which outlive it. After a crash its
successor starts with the message that was being handled. One report may concern many accounts, each of which may take
milliseconds to make, so other tasks run between them.

What must always hold: no account outlives its request and its sequences; a message is written once, however often the
accountant crashes on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import trio

from ..channel import EagerSender, Receiver
from ..messages.accountant import (
    Answered,
    Answering,
    Completed,
    EngineDied,
    Forwarded,
    Left,
    OpenAccount,
    Prompted,
    Refused,
    Routed,
    StepReport,
    Unsent,
)
from ..messages.detokenizer import Tokens
from ..request_desk.desk import RequestDesk
from .account_entries import Estimation
from .effects import SideEffects
from .entry_store import AccountantMessage, EntryStore, Pending
from .journal import Journal
from .metrics import Metrics
from .report_writer import ReportWriter, time_tokens
from .request_entries import RequestEntries, RequestMessage

log = structlog.get_logger()

SLICE_S = 0.002
"""How long the accountant may work without letting other tasks run."""
MAX_ROWS_NOW = 16
"""Rows of a step that are booked in the task of its engine's link, where waking the accountant would cost as much."""


class Accountant:
    def __init__(
        self,
        store: EntryStore,
        metrics: Metrics,
        desk: RequestDesk,
        journal: Journal,
        detokenizer: EagerSender[Tokens],
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._desk = desk
        self._journal = journal
        self._detokenizer = detokenizer
        self._unix_time = unix_time
        self._writer = ReportWriter(store, desk.sequences)
        self._effects = SideEffects(store, metrics, desk, journal, log)
        self._slice_end = 0.0

    async def run(self, inbox: Receiver[AccountantMessage]) -> None:
        store, pending = self._store, self._store.pending
        while True:
            while pending:
                num_given_up = store.num_given_up
                await self._handle(pending[0])
                pending.popleft()
                store.num_handled += store.num_given_up == num_given_up
                await self._let_others_run()
            self._journal.flush()
            messages = await inbox.receive_all(self._take_now)
            self._slice_end = time.perf_counter() + SLICE_S
            now = trio.current_time()
            pending.extend(Pending(message, now) for message in messages)

    async def _handle(self, pending: Pending) -> None:
        """Write a message's entries, apply the side effects that are due, and pass a step's tokens on between them."""
        message = pending.message
        if not pending.is_written:
            pending.is_written = True
            self._write(pending)
        if isinstance(message, EngineDied):
            self._metrics.set_engine_gone(message.engine_id, self._desk.num_usable_blocks_of(message.engine_id))
            self._store.cache.on_engine_gone(message.engine_id)
        await self._apply_due(pending.concerned, pending.at)
        if isinstance(message, StepReport):
            if not self._pass_on(pending, message):
                await self._detokenizer.send(tokens_of(message))
                pending.is_passed_on = True
            self._show(pending, message)
            await self._apply_due(pending.ended, pending.at)

    def _write(self, pending: Pending) -> None:
        """Write a message into the store, having noted which requests it concerns."""
        store, message = self._store, pending.message
        match message:
            case StepReport():
                self._write_report(pending, message)
            case EngineDied():
                self._metrics.engine_deaths.inc(1, message.engine_id)
                pending.concerned = store.requests_of(message.held_ids)
                taken = self._writer.write_engine_death(message)
                log.warning(
                    "engine.requests_taken_back",
                    engine_id=message.engine_id,
                    incarnation=message.incarnation,
                    num_resumed=len(taken.resumed),
                    num_ended=len(taken.ended),
                    num_failed=len(taken.failed) + len(taken.culprits),
                    num_pinned_blocks_lost=store.cache.num_pinned.get(message.engine_id, 0),
                )
            case Unsent(sequence_id):
                pending.concerned = store.requests_of([sequence_id])
                self._writer.write_unsent(sequence_id)
            case Routed():
                self._writer.add(message.sequence_id, Estimation(message.num_overlapping))
            case OpenAccount():
                store.open(message, self._unix_time())
                self._metrics.open_accounts.set(store.num_open_accounts)
            case Prompted():
                store.add_prompts(message)
            case _:
                request = store.requests.get(message.request_id)
                if request is not None:  # None: it was closed before its client was answered
                    pending.concerned = [request]
                    self._write_about(request, message, pending.at)
                elif isinstance(message, Refused):
                    store.filed.answer_late(message)

    def _write_about(self, request: RequestEntries, message: RequestMessage, now: float) -> None:
        match message:
            case Completed():
                request.complete(message)
            case Left():
                request.left = True
                request.awaited = frozenset(message.submitted_ids)
            case Refused():
                request.fail(message.error, message.fault)
            case Forwarded() | Answering() | Answered():
                request.add_from_upstream(message, now)

    def _take_now(self, message: AccountantMessage) -> bool:
        """Note a message, and handle it in its sender's task if that is quick. Return whether it is handled."""
        store, pending = self._store, Pending(message, trio.current_time())
        store.pending.append(pending)
        if not self._handle_now(pending):
            return False
        store.pending.popleft()
        store.num_handled += 1
        self._journal.flush()
        return True

    def _handle_now(self, pending: Pending) -> bool:
        """Handle the report of a small step that brought nothing but tokens; return whether that was one.

        Otherwise `_handle` goes on from where it was left.
        """
        report = pending.message
        if not isinstance(report, StepReport) or len(report.span_ids) > MAX_ROWS_NOW:
            return False
        if report.admitted_ids or report.revised_ids or report.terminal_ids:
            return False
        pending.is_written = True
        self._write_report(pending, report)
        if pending.concerned or not self._pass_on(pending, report):
            return False
        self._show(pending, report)
        return True

    def _write_report(self, pending: Pending, report: StepReport) -> None:
        if not self._is_next(report):
            pending.is_timed = pending.is_passed_on = pending.is_shown = True
            return
        first_ids = self._writer.first_tokens(report)
        unbegun_ids = self._writer.unbegun(report.terminal_ids)
        pending.concerned = self._store.requests_of(
            [*report.admitted_ids, *report.revised_ids, *first_ids, *unbegun_ids]
        )
        pending.ended = self._store.requests_of(report.terminal_ids)
        try:
            self._writer.write_report(report, first_ids, pending.at)
        except ValueError as error:
            log.error("report.unreadable", number=report.number, error=str(error))
            self._writer.write_gap(report.incarnation)

    def _pass_on(self, pending: Pending, report: StepReport) -> bool:
        """Pass a step's tokens on, unless they were; return False if the detokenizer has no room for them."""
        if report.token_ids and not pending.is_timed:
            pending.is_timed = True
            time_tokens(report, pending.at, self._store, self._metrics)
        if not pending.is_passed_on and (report.token_ids or report.payloads or report.ended_ids):
            tokens = tokens_of(report)
            if not (self._detokenizer.deliver_now(tokens) or self._detokenizer.send_nowait(tokens)):
                return False
            pending.is_passed_on = True
        return True

    def _show(self, pending: Pending, report: StepReport) -> None:
        if not pending.is_shown:
            pending.is_shown = True
            self._metrics.set_step(report, self._desk.num_usable_blocks_of(report.engine_id))
            self._watch_blocks(report, pending.at)
        self._end_those_with_gaps(report)

    def _watch_blocks(self, report: StepReport, now: float) -> None:
        """Tell the cache watch what has become of blocks: with most reports nothing."""
        by_sequence, cache = self._store.by_sequence, self._store.cache
        cache.num_pinned[report.engine_id] = report.num_pinned_blocks
        if report.filled_ids or report.pinned_ids or report.removed_keys or report.num_pins_yielded:
            tenants = {
                sequence_id: (request.opened.caller.tenant, request.opened.caller.model)
                for sequence_id in (*report.filled_ids, *report.pinned_ids)
                if (request := by_sequence.get(sequence_id)) is not None
            }
            cache.on_report(report, tenants, now)
        if report.terminal_ids:  # after what these sequences have filled in their last step
            cache.on_end(report.terminal_ids, now)

    def _is_next(self, report: StepReport) -> bool:
        """Whether a report is new. One that was received before is not booked again; a gap before it is noted."""
        store, engine_id, incarnation = self._store, report.engine_id, report.incarnation
        if incarnation <= store.last_dead.get(engine_id, -1):
            log.error("report.of_dead_engine", engine_id=engine_id, incarnation=incarnation, number=report.number)
            return False
        expected = store.num_reports.get(engine_id, 0) + 1
        if report.number < expected:
            log.error("report.repeated", engine_id=engine_id, number=report.number, expected=expected)
            return False
        if report.number > expected:
            log.error("report.lost", engine_id=engine_id, number=report.number, expected=expected)
            self._writer.write_gap(incarnation)
        store.num_reports[engine_id] = report.number
        return True

    def _end_those_with_gaps(self, report: StepReport) -> None:
        if sequence_ids := self._writer.sequences_with_gaps(report):
            self._desk.abandon(sequence_ids)

    async def _apply_due(self, requests: list[RequestEntries], now: float) -> None:
        """Apply the side effects that are due for those of these requests that are open."""
        for request in requests:
            await self._let_others_run()
            if self._store.is_open(request):
                for _ in self._effects.explanations.prepare(request):
                    await self._let_others_run()
                self._effects.apply_due(request, now)

    async def _let_others_run(self) -> None:
        """Execute a checkpoint if the last one was more than `SLICE_S` ago."""
        if time.perf_counter() > self._slice_end:
            await trio.lowlevel.checkpoint()
            self._slice_end = time.perf_counter() + SLICE_S


def tokens_of(report: StepReport) -> Tokens:
    """Return the part of a report that the detokenizer needs."""
    return Tokens(report.token_sequence_ids, report.token_ids, report.ended_ids, report.ended_reasons, report.payloads)
