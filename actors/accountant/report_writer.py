"""Writes what the engine reports into the entry store: the columns of a step report, lost reports, engine deaths.

Used by the accountant's `actor.py`. Synchronous: a report is written completely or, if it is malformed, reported as
ValueError, after which the actor treats it as lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..messages.accountant import EngineDied, Side, StepReport
from ..messages.block_manager import CacheMiss, MissReason
from ..messages.outcomes import ErrorKind, Fault, RequestError
from ..request_desk.live_sequence import TakenBack
from ..request_desk.live_sequences import LiveSequences
from .account_entries import (
    Admission,
    Ended,
    EngineLost,
    Entry,
    Estimation,
    FirstToken,
    Gap,
    HandedOver,
    Pinned,
    Revision,
    Written,
)
from .entry_store import EntryStore
from .metrics import Metrics


class ReportWriter:
    def __init__(self, store: EntryStore, sequences: LiveSequences) -> None:
        self._store = store
        self._sequences = sequences

    def write_report(self, report: StepReport, first_ids: Sequence[int], now: float) -> None:
        """Write every entry of a report into its request's entries. Raises ValueError for a malformed report.

        `first_ids` are its sequences that had no token before. Columns that most reports leave empty are skipped
        together.
        """
        requests, sequences = self._store.by_sequence, self._sequences
        if report.admitted_ids or report.admitted_number:
            self._write_admissions(report, now)
        if report.estimated_ids or report.estimated_tokens or report.revised_ids or report.revised_tokens:
            for sequence_id, num in zip(report.estimated_ids, report.estimated_tokens, strict=True):
                self.add(sequence_id, Estimation(num))
            revisions = zip(report.revised_ids, report.revised_tiers, report.revised_tokens, strict=True)
            for sequence_id, tier, num in revisions:
                self.add(sequence_id, Revision(tier, num))
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=True):
            if (request := requests.get(sequence_id)) is not None:
                request.add_span(sequence_id, start, end)
        if report.draft_ids or report.draft_starts:
            self._write_drafts(report)
        if (
            report.written_ids
            or report.written_starts
            or report.written_ends
            or report.pinned_ids
            or report.pinned_ends
        ):
            written = zip(report.written_ids, report.written_starts, report.written_ends, strict=True)
            for sequence_id, start, end in written:
                self.add(sequence_id, Written(start, end))
            for sequence_id, end in zip(report.pinned_ids, report.pinned_ends, strict=True):
                self.add(sequence_id, Pinned(end))
        sequences.note_tokens(report.token_sequence_ids, report.token_ids)
        sequences.note_last_tokens(report.ended_ids)
        for found in report.payloads:
            for sequence_id, end in zip(found.ids, found.ends, strict=True):
                sequences.note_prompt_scores(sequence_id, end)
        sequences.note_progress(report.span_ids, report.span_ends)
        for sequence_id in dict.fromkeys(first_ids):
            self.add(sequence_id, FirstToken(now))
        if report.terminal_ids or report.terminal_errors:
            self._write_terminals(report)

    def add(self, sequence_id: int, entry: Entry) -> None:
        """Write an entry, unless its request is closed."""
        if (request := self._store.by_sequence.get(sequence_id)) is not None:
            request.add(sequence_id, entry)

    def _write_drafts(self, report: StepReport) -> None:
        for sequence_id, start, kept, end, is_predicted in zip(
            report.draft_ids,
            report.draft_starts,
            report.draft_kept,
            report.draft_ends,
            report.draft_predicted,
            strict=True,
        ):
            if (request := self._store.by_sequence.get(sequence_id)) is not None:
                request.add_draft(sequence_id, start, kept, end, is_predicted=is_predicted)

    def _write_terminals(self, report: StepReport) -> None:
        for sequence_id, error, kind in zip(
            report.terminal_ids, report.terminal_errors, report.terminal_error_kinds, strict=True
        ):
            if error is None and self._resume_elsewhere(sequence_id):
                continue
            # an engine's internal errors of single sequences: its step raised, or its logits were not finite
            is_ours = error is not None and (kind or ErrorKind.INTERNAL) == ErrorKind.INTERNAL
            self._write_terminal(sequence_id, error, kind, Fault.STEP_FAILED if is_ours else None)

    def write_gap(self, incarnation: int) -> None:
        """Mark every sequence that an engine holds: a report of it was lost, and may have concerned any of them."""
        for sequence_id in self._sequences.held_by(incarnation):
            self.add(sequence_id, Gap())

    def write_engine_death(self, message: EngineDied) -> TakenBack:
        """Write what becomes of the sequences that the dead engine held; expect its successor's first report."""
        store, incarnation = self._store, message.incarnation
        store.num_reports.pop(message.engine_id, None)
        store.last_dead[message.engine_id] = incarnation
        requests = store.by_sequence
        lost = {i for i in message.held_ids if i not in requests or requests[i].has_gap}
        held = {i: 0 if i not in requests else requests[i].num_computed(i) for i in message.held_ids}
        taken = self._sequences.take_back(incarnation, held, lost, message.step_ids, is_last=message.is_last)
        for sequence_id in taken.resumed:
            requests[sequence_id].add(sequence_id, EngineLost(incarnation))
        for sequence_id in taken.ended:
            self._write_terminal(sequence_id, None, None, None)
        for sequence_ids, what in (
            (taken.failed, "The engine died"),
            (taken.culprits, "The engine died again when no other request could have been the cause"),
        ):
            for sequence_id in sequence_ids:
                error = f"{what}: {message.reason}"
                self._write_terminal(sequence_id, error, ErrorKind.INTERNAL, Fault.ENGINE_DIED)
        return taken

    def _resume_elsewhere(self, sequence_id: int) -> bool:
        """Resume a sequence on another engine if this one has ended it for that."""
        request = self._store.by_sequence.get(sequence_id)
        if request is None or request.has_gap:
            return False
        was_admitted = request.was_admitted(sequence_id)
        if not self._sequences.resume_elsewhere(sequence_id, was_admitted=was_admitted):
            return False
        request.add(sequence_id, HandedOver())
        return True

    def write_unsent(self, sequence_id: int) -> None:
        """End a sequence that no engine was given again."""
        self._write_terminal(sequence_id, None, None, None)

    def first_tokens(self, report: StepReport) -> list[int]:
        """Return the report's sequences that had no token before it."""
        last_token_at = self._store.last_token_at
        return [i for i in report.token_sequence_ids if i not in last_token_at]

    def unbegun(self, sequence_ids: list[int]) -> list[int]:
        """Return those that are the first choices of prompts, and have had no token."""
        requests = self._store.by_sequence
        return [i for i in sequence_ids if i in requests and requests[i].has_unbegun_prompt(i)]

    def sequences_with_gaps(self, report: StepReport) -> list[int]:
        """Return the sequences with lost reports that have ended: by a Terminal, or because the engine is idle."""
        requests = self._store.by_sequence
        is_idle = report.num_running == report.num_waiting == 0
        if not (is_idle or report.terminal_ids):
            return []
        candidates = self._sequences.held_by(report.incarnation) if is_idle else report.terminal_ids
        return [i for i in candidates if i in requests and requests[i].has_gap]

    def _write_admissions(self, report: StepReport, now: float) -> None:
        requests = self._store.by_sequence
        num = len(report.admitted_ids)
        for (
            sequence_id,
            number,
            reused,
            read,
            copyable,
            copied,
            reason,
            token,
            detail,
            tiers,
            spans,
            side,
            step_s,
        ) in zip(
            report.admitted_ids,
            report.admitted_number,
            report.admitted_reused,
            report.admitted_read,
            report.admitted_copyable or [0] * num,
            report.admitted_copied or [0] * num,
            report.admitted_miss_reasons,
            report.admitted_miss_tokens,
            report.admitted_miss_details or [None] * num,
            report.admitted_tiers or [{"device": reused} for reused in report.admitted_reused],
            report.admitted_tier_spans or [{}] * num,
            report.admitted_sides or [Side.PREFILL] * num,
            report.admitted_step_s or [0.0] * num,
            strict=True,
        ):
            if (request := requests.get(sequence_id)) is not None:
                admission = Admission(
                    number=number,
                    side=Side(side),
                    reused=None if tiers is None else reused,
                    tiers=tiers,
                    tier_spans=spans,
                    read=read,
                    copyable=copyable,
                    copied=copied,
                    miss=CacheMiss(MissReason(reason), token, detail),
                    engine_id=report.engine_id,
                    incarnation=report.incarnation,
                    at=now - step_s,
                )
                request.add(sequence_id, admission)

    def _write_terminal(self, sequence_id: int, error: str | None, kind: str | None, fault: Fault | None) -> None:
        self._sequences.mark_ended(sequence_id)
        request = self._store.by_sequence.get(sequence_id)
        if request is not None:
            request.add(sequence_id, Ended())
            if error is not None:
                request.fail(RequestError(ErrorKind(kind or ErrorKind.INTERNAL), error), fault)


def time_tokens(report: StepReport, now: float, store: EntryStore, metrics: Metrics) -> None:
    """Observe how long each token of a step came after its predecessor, and note when it came.

    Nearly all of them have waited for the same step, so equal times are observed in one call.
    """
    last, requests = store.last_token_at, store.by_sequence
    num_since: dict[float, int] = {}
    """Number of tokens by the time of their predecessor."""
    for sequence_id in report.token_sequence_ids:
        before = last.get(sequence_id)
        if before is not None:
            num_since[before] = num_since.get(before, 0) + 1
        elif sequence_id not in requests:
            continue
        last[sequence_id] = now
    for before, num_tokens in num_since.items():
        metrics.inter_token_latency.observe(now - before, num_tokens, engine_id=report.engine_id)
