"""The columns of the next `StepReport`, while the scheduler fills them.

The columns of a single step are passed on as they are; those of several steps are joined.
What must always hold: entries are sent in the order in which they were made, each once.
"""

from __future__ import annotations

from typing import Any

from ...messages.accountant import Side, StepReport
from ...messages.block_manager import CacheMiss
from ...messages.outcomes import ErrorKind, FinishReason
from ...messages.scheduler import Granted, StepDone
from ...messages.scores import StepPayloads
from ...messages.tiers import Tier, TierReport, TierSpans, num_positions

Columns = tuple[list[int], ...]


class ReportBuilder:
    """Collects what the web side has to be told until the next report is sent."""

    def __init__(self) -> None:
        self._num_reports = 0
        self._tiers: list[TierReport] = []
        self._clear()

    def _clear(self) -> None:
        self.num_preempted = 0
        self.num_pins_yielded = 0
        self.is_due = False
        """A report is wanted, even if it tells of nothing but free and cached blocks."""
        self._pinned: list[Columns] = []
        self._admitted: list[tuple[Any, ...]] = []
        self._spans: list[Columns] = []
        self._drafts: list[tuple[int, int, int, int, bool]] = []
        self._tokens: list[Columns] = []
        self._written: list[Columns] = []
        self._stored_keys = self._removed_keys = b""
        self._lowered_keys: dict[str, bytes] = {}
        self._raised_keys = b""
        self._shared_keys = self._unshared_keys = b""
        self._is_cleared = False
        self._filled_ids: list[int] = []
        self._filled_keys: list[bytes] = []
        self._payloads: list[StepPayloads] = []
        self._ended: list[tuple[int, str]] = []
        self._terminals: list[tuple[int, str | None, str | None]] = []

    @property
    def has_news(self) -> bool:
        return bool(
            self._spans
            or self._terminals
            or self._written
            or self._pinned
            or self.num_preempted
            or self._stored_keys
            or self._removed_keys
            or self._is_cleared
            or self._lowered_keys
            or self._raised_keys
            or self._shared_keys
            or self._unshared_keys
            or self._tiers
            or self.is_due
        )

    def admit(
        self,
        sequence_id: int,
        number: int,
        *,
        reused: int,
        read: int,
        copyable: int,
        copied: int,
        miss: CacheMiss,
        step_s: float,
        tier_spans: TierSpans,
        side: Side = Side.PREFILL,
    ) -> None:
        counts = (reused, read, copyable, copied)
        self._admitted.append(
            (sequence_id, number, *counts, miss.reason.value, miss.token, miss.detail, step_s, tier_spans, side.value)
        )

    def spans(self, sequence_ids: list[int], starts: list[int], ends: list[int]) -> None:
        self._spans.append((sequence_ids, starts, ends))

    def drafts(self, done: StepDone) -> None:
        """Add the draft tokens that a step has verified."""
        for row, end in zip(done.draft_rows, done.draft_ends, strict=True):
            start, kept = done.row_starts[row] + 1, done.row_ends[row]
            self._drafts.append((done.row_ids[row], start, max(start, kept), end, row in done.predicted_rows))

    def tokens(self, sequence_ids: list[int], token_ids: list[int]) -> None:
        if token_ids:
            self._tokens.append((sequence_ids, token_ids))

    def payloads(self, found: StepPayloads) -> None:
        self._payloads.append(found)

    def end(self, sequence_id: int, reason: FinishReason) -> None:
        self._ended.append((sequence_id, reason.value))

    def terminal(self, sequence_id: int, error: str | None, kind: ErrorKind | None) -> None:
        self._terminals.append((sequence_id, error, None if kind is None else kind.value))

    def write(self, granted: Granted) -> None:
        """Add what a grant has committed. To be followed by `flush`, or the next grant's keys replace this one's."""
        if granted.written_ids:
            self._written.append((granted.written_ids, granted.written_starts, granted.written_ends))
        if granted.pinned_ids:
            self._pinned.append((granted.pinned_ids, granted.pinned_ends))
        self.num_pins_yielded += granted.num_pins_yielded
        self._stored_keys, self._removed_keys = granted.stored_keys, granted.removed_keys
        self._lowered_keys, self._raised_keys = granted.lowered_keys, granted.raised_keys
        self._shared_keys, self._unshared_keys = granted.shared_keys, granted.unshared_keys
        self._is_cleared = granted.is_cleared
        if granted.tiers:
            self._tiers = granted.tiers

    def fill(self, sequence_ids: list[int], keys: list[bytes]) -> None:
        """Add blocks that decoding has filled, to be told with the next report that has other news."""
        self._filled_ids += sequence_ids
        self._filled_keys += keys

    def flush(
        self,
        *,
        step: int,
        num_running: int,
        num_waiting: int,
        num_free_blocks: int,
        num_cached_blocks: int,
        num_pinned_blocks: int,
    ) -> StepReport:
        span_ids, span_starts, span_ends = _join(self._spans, 3)
        written_ids, written_starts, written_ends = _join(self._written, 3) if self._written else ([], [], [])
        token_sequence_ids, token_ids = _join(self._tokens, 2)
        pinned_ids, pinned_ends = _join(self._pinned, 2) if self._pinned else ([], [])
        ids, numbers, reused, read, copyable, copied, reasons, tokens, details, step_s, spans, sides = _columns(
            self._admitted, 12
        )
        tier_spans = spans if any(spans) else []
        draft_ids, draft_starts, draft_kept, draft_ends, draft_predicted = _columns(self._drafts, 5)
        ended_ids, ended_reasons = _columns(self._ended, 2)
        terminal_ids, errors, error_kinds = _columns(self._terminals, 3)
        self._num_reports += 1
        report = StepReport(
            number=self._num_reports,
            step=step,
            admitted_ids=ids,
            admitted_number=numbers,
            admitted_reused=reused,
            admitted_read=read,
            admitted_miss_reasons=reasons,
            admitted_miss_tokens=tokens,
            span_ids=span_ids,
            span_starts=span_starts,
            span_ends=span_ends,
            written_ids=written_ids,
            written_starts=written_starts,
            written_ends=written_ends,
            token_sequence_ids=token_sequence_ids,
            token_ids=token_ids,
            ended_ids=ended_ids,
            ended_reasons=ended_reasons,
            terminal_ids=terminal_ids,
            terminal_errors=errors,
            terminal_error_kinds=error_kinds,
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
            num_cached_blocks=num_cached_blocks,
            num_preempted=self.num_preempted,
            pinned_ids=pinned_ids,
            pinned_ends=pinned_ends,
            num_pinned_blocks=num_pinned_blocks,
            num_pins_yielded=self.num_pins_yielded,
            admitted_copyable=copyable,
            admitted_copied=copied,
            payloads=self._payloads,
            stored_keys=self._stored_keys,
            removed_keys=self._removed_keys,
            is_cleared=self._is_cleared,
            lowered_keys=self._lowered_keys,
            raised_keys=self._raised_keys,
            shared_keys=self._shared_keys,
            unshared_keys=self._unshared_keys,
            filled_ids=self._filled_ids,
            filled_keys=b"".join(self._filled_keys),
            admitted_miss_details=details if any(details) else [],
            admitted_step_s=step_s,
            admitted_tiers=[_by_tier(*admitted) for admitted in zip(reused, tier_spans, strict=False)],
            admitted_tier_spans=tier_spans,
            admitted_sides=sides if Side.DECODE in sides else [],
            draft_ids=draft_ids,
            draft_starts=draft_starts,
            draft_kept=draft_kept,
            draft_ends=draft_ends,
            draft_predicted=draft_predicted,
            tiers=self._tiers,
        )
        self._tiers = []
        self._clear()
        return report


def _by_tier(num_reused: int, tier_spans: TierSpans) -> dict[str, int] | None:
    """Return where reused tokens came from, given the spans of those from lower tiers."""
    lower = {tier: num_positions(spans) for tier, spans in tier_spans.items()}
    return {Tier.DEVICE.value: num_reused - sum(lower.values()), **lower}


def _columns(rows: list[Any], num_columns: int) -> list[list[Any]]:
    """Return the columns of rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(num_columns)]


def _join(groups: list[Columns], num_columns: int) -> Columns:
    """Concatenate groups of columns."""
    if len(groups) == 1:
        return groups[0]
    return tuple([value for group in groups for value in group[column]] for column in range(num_columns))
