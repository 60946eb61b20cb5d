"""The columns of the next `StepReport`, while the scheduler fills them.

Used by `batching.py` only. What must always hold: entries go out in the order in which they were made, each once.
"""

from __future__ import annotations

from quipu.actors.messages import ErrorKind, FinishReason, Granted, StepReport


class ReportBuilder:
    """Collects what the web side has to hear, until the next grant lets it go out."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.num_preempted = 0
        self._admitted: list[tuple[int, int, int, int]] = []
        self._span_ids: list[int] = []
        self._span_starts: list[int] = []
        self._span_ends: list[int] = []
        self._written: list[tuple[int, int, int]] = []
        self._token_sequence_ids: list[int] = []
        self._token_ids: list[int] = []
        self._ended: list[tuple[int, FinishReason]] = []
        self._terminals: list[tuple[int, str | None, ErrorKind | None]] = []

    @property
    def has_news(self) -> bool:
        return bool(self._span_ids or self._terminals or self._written or self.num_preempted)

    def admit(self, sequence_id: int, number: int, reused: int, read: int) -> None:
        self._admitted.append((sequence_id, number, reused, read))

    def span(self, sequence_id: int, start: int, end: int) -> None:
        self._span_ids.append(sequence_id)
        self._span_starts.append(start)
        self._span_ends.append(end)

    def token(self, sequence_id: int, token_id: int) -> None:
        self._token_sequence_ids.append(sequence_id)
        self._token_ids.append(token_id)

    def end(self, sequence_id: int, reason: FinishReason) -> None:
        self._ended.append((sequence_id, reason))

    def terminal(self, sequence_id: int, error: str | None, kind: ErrorKind | None) -> None:
        self._terminals.append((sequence_id, error, kind))

    def write(self, granted: Granted) -> None:
        self._written += zip(granted.written_ids, granted.written_starts, granted.written_ends, strict=True)

    def flush(
        self, *, step: int, num_running: int, num_waiting: int, num_free_blocks: int, num_cached_blocks: int
    ) -> StepReport:
        report = StepReport(
            step=step,
            admitted_ids=[a[0] for a in self._admitted],
            admitted_number=[a[1] for a in self._admitted],
            admitted_reused=[a[2] for a in self._admitted],
            admitted_read=[a[3] for a in self._admitted],
            span_ids=self._span_ids,
            span_starts=self._span_starts,
            span_ends=self._span_ends,
            written_ids=[w[0] for w in self._written],
            written_starts=[w[1] for w in self._written],
            written_ends=[w[2] for w in self._written],
            token_sequence_ids=self._token_sequence_ids,
            token_ids=self._token_ids,
            ended_ids=[e[0] for e in self._ended],
            ended_reasons=[e[1].value for e in self._ended],
            terminal_ids=[t[0] for t in self._terminals],
            terminal_errors=[t[1] for t in self._terminals],
            terminal_error_kinds=[None if t[2] is None else t[2].value for t in self._terminals],
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
            num_cached_blocks=num_cached_blocks,
            num_preempted=self.num_preempted,
        )
        self._clear()
        return report
