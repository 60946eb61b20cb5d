"""Where every sequence is, and the transitions between those places.

Shared by the batcher (`planning.py`), which admits and preempts, and by step completion (`completion.py`), which ends
sequences and takes failed steps back.

    submit ─▶ waiting ─▶ running ─▶ ended ─▶ Terminal (after the last step that contains the sequence)
                 ▲           │
                 └───────────┘ preempted: recomputed from its known tokens, ahead of sequences not served yet

What must always hold: every sequence that leaves the running set is released by the executor, and by the block manager
unless the latter preempted it; each Submit gets exactly one Terminal, and nothing about a sequence is reported after
it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ...messages.outcomes import ErrorKind
from .config import SchedulerConfig
from .in_flight import StepsInFlight
from .late_planning import LatePlanning
from .prefill_speed import PrefillSpeed
from .report_builder import ReportBuilder
from .running import RunningSet
from .sequence import Sequence, Status
from .step_retries import Retries
from .token_budget import TokenBudget
from .waiting import WaitingQueue


@attrs.define
class CacheUpdates:
    """What the block manager has to be told by the next `Reserve`, whether or not there is a step to propose."""

    committed_steps: list[int] = attrs.field(factory=list)
    broken_ids: list[int] = attrs.field(factory=list)
    """Sequences for which these steps computed NaN."""
    failed_steps: list[int] = attrs.field(factory=list)
    filled: list[tuple[int, int, bytes, bytes, list[int]]] = attrs.field(factory=list)
    """Blocks filled by decoding: sequence id, block index, key, parent key, token ids."""
    freed_ids: list[int] = attrs.field(factory=list)
    returned_ids: list[int] = attrs.field(factory=list)
    """Those of these whose admission was undone."""
    shared_keys: list[bytes] = attrs.field(factory=list)
    """Keys that the object store may have, of sequences that have come. They can wait until one is proposed."""
    resets_prefix_cache: bool = False
    announces_keys: bool = False
    """Only the block manager's keys are wanted."""

    def __bool__(self) -> bool:
        return bool(
            self.committed_steps
            or self.failed_steps
            or self.filled
            or self.freed_ids
            or self.resets_prefix_cache
            or self.announces_keys
        )


class SchedulerState:
    """All sequences of one engine, the steps in flight, and what other actors have yet to be told."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue(config.policy)
        self.token_budget = TokenBudget(config.max_num_batched_tokens, clock, config.least_budget)
        self.running = RunningSet(config, self.waiting, self.token_budget)
        self.retries = Retries()
        self.in_flight = StepsInFlight()
        self.report = ReportBuilder()
        self.cache_updates = CacheUpdates()
        self.released_ids: list[int] = []
        """Sequences that the executor may forget, for the next plan."""
        self.forgets_outputs = False
        """The executor must forget outputs, likewise."""
        self.some_blocks_unsent = False
        """Some running sequence may have `unsent_blocks`."""
        self.last_answered_step = 0
        self.prefill_speed = PrefillSpeed()
        self.late_planning = LatePlanning(clock) if config.plans_late else None
        self._ending: dict[int, list[Sequence]] = {}
        """Ended sequences, by the last step that contains them."""

    def take_cache_updates(self) -> CacheUpdates:
        updates, self.cache_updates = self.cache_updates, CacheUpdates()
        return updates

    def admit(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Move a waiting sequence to the running set; its first `num_cached_tokens` need no computation."""
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.status = Status.RUNNING
        sequence.next_start = num_cached_tokens
        sequence.prefill_end = len(sequence.tokens)
        sequence.num_admissions += 1

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue. The block manager has released its blocks, or will before others."""
        self.report.num_preempted += 1
        self.retries.remove([sequence.id])
        self._stop_running(sequence)
        self._requeue(sequence)

    def give_way(self, sequence: Sequence) -> None:
        """Return a running line of a batch to the queue, so that the next `Reserve` can admit others in its place."""
        self.cache_updates.freed_ids.append(sequence.id)
        self.preempt(sequence)

    def undo_admission(self, sequence: Sequence) -> None:
        """Return a sequence to the queue: the first step of its admission failed or was dropped, and never booked."""
        self._stop_running(sequence)
        self.cache_updates.freed_ids.append(sequence.id)
        self.cache_updates.returned_ids.append(sequence.id)
        self._requeue(sequence)

    def end(self, sequence: Sequence, error: str | None = None, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        """End a sequence that is running or in no queue. Its Terminal follows the last step that contains it."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
            self.cache_updates.freed_ids.append(sequence.id)
        elif sequence.has_loaded or sequence.peer is not None:  # blocks may be on their way, if it was never proposed
            self.cache_updates.freed_ids.append(sequence.id)
            if sequence.id in self.cache_updates.returned_ids:
                self.cache_updates.returned_ids.remove(sequence.id)
        self.retries.remove([sequence.id])
        sequence.status = Status.ENDED
        sequence.error = error
        sequence.error_kind = kind if error is not None else None
        if sequence.last_step > self.last_answered_step:
            self._ending.setdefault(sequence.last_step, []).append(sequence)
        else:
            self._report_terminal(sequence)

    def report_terminals(self, step: int) -> None:
        """Report the Terminals that were waiting for `step` to be answered."""
        for sequence in self._ending.pop(step, ()):
            self._report_terminal(sequence)

    def _report_terminal(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self.report.terminal(sequence.id, sequence.error, sequence.error_kind)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.released_ids.append(sequence.id)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.restart()
        self.waiting.push(sequence)
