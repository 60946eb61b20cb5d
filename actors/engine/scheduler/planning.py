"""Continuous batching: who runs in the next step.

Called by the scheduler's actor only. Synchronous: a step is one call of `next_action`, one answer of the block manager
where it was asked, and one call of `accept`. Steps overlap: while step k runs, k+1 is planned and sent; a decoding row
feeds the token sampled by the step before it, on the device.

A decoding row needs the block manager only where its next position opens a block. Such rows, and those that prefill,
are in the `Reserve`; the other decoding rows run unless they are preempted. A step of such rows alone is sent without
asking.

Sequences and their places are in `state.py`, plans are made in `plan_builder.py`, and what a finished step means is in
`completion.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from ...messages.accountant import StepReport
from ...messages.block_manager import Reserve
from ...messages.executor import StepPlan
from ...messages.outcomes import ErrorKind
from ...messages.scheduler import Granted, StepDone, StepDropped, StepFailed, Submit
from .admission import AdmissionControl, make_sequence, why_never
from .completion import StepCompletion
from .config import SchedulerConfig
from .plan_builder import NO_DECODE_ROWS, DecodeRows, PlanBuilder
from .running import NOTHING_PROPOSED, Proposal
from .sequence import Status
from .state import SchedulerState


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """What to send now: the plan first, then the report of earlier steps."""

    plan: StepPlan | None
    report: StepReport | None
    replan: bool = False
    """There is no plan, but another try may make one."""


class Batcher:
    """The scheduler's decisions for one engine."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds, by which a lowered token budget ends."""
        self.config = config
        self._state = SchedulerState(config, clock)
        self.sequences = self._state.sequences
        """All that have not ended, by id."""
        self._admission = AdmissionControl(config)
        self._completion = StepCompletion(self._state)
        self._plans = PlanBuilder(self._state)
        self._decode_rows = NO_DECODE_ROWS
        """Those of the step that the block manager is being asked about."""
        self._asks_for_rows = False
        """That step has rows of running sequences that need something from it."""
        self._asks_for_group = False
        """That step is of one group of a failed step's rows."""
        self._next_arrival = 0
        self._num_free_blocks = config.num_blocks - 1
        self._num_cached_blocks = 0
        self._num_pinned_blocks = 0

    # ------------------------------------------------------------ from the web side

    def submit(self, message: Submit) -> None:
        """Queue a new sequence, or end it at once if it may not wait or can never fit."""
        state = self._state
        sequence = make_sequence(message, self._next_arrival, self.config)
        self._next_arrival += 1
        self.sequences[sequence.id] = sequence
        refusal = self._admission.refusal_of(message, state.waiting, len(state.running))
        if (reason := why_never(sequence, self.config)) is not None:
            state.end(sequence, reason, ErrorKind.INVALID)
        elif refusal is not None:
            state.end(sequence, refusal.reason, refusal.kind)
        else:
            state.waiting.push(sequence)
            if message.num_shared_blocks and message.reads_cache:
                state.cache_updates.shared_keys += sequence.keys[: message.num_shared_blocks]

    @property
    def num_groups(self) -> int:
        """Requests with sequences that have not been submitted yet."""
        return self._admission.num_groups

    def reset_prefix_cache(self) -> None:
        """Find nothing that has been published so far, from the next step on."""
        self._state.cache_updates.resets_prefix_cache = True
        self._state.forgets_outputs = True

    def announce_keys(self) -> None:
        """Report the block manager's keys, and how many blocks are free, even if nothing runs."""
        self._state.cache_updates.announces_keys = self._state.report.is_due = True

    def end_group(self, group_id: int) -> None:
        """Expect no further sequences of a request."""
        self._admission.end_group(group_id)

    def abort(self, sequence_id: int) -> None:
        """End a sequence wherever it is. Does nothing if it has ended or was never here."""
        sequence = self.sequences.get(sequence_id)
        if sequence is not None and sequence.status is not Status.ENDED:
            if sequence.status is Status.WAITING:
                self._state.waiting.remove(sequence)
            self._state.end(sequence)

    def on_loads_over(self, sequence_ids: Iterable[int]) -> None:
        """Propose sequences again that waited for blocks. Those that have ended meanwhile are ignored."""
        self._state.waiting.end_loading(sequence_ids)

    # ------------------------------------------------------------ from the executor

    def on_done(self, done: StepDone) -> None:
        self._completion.on_done(done)

    def on_failed(self, failed: StepFailed) -> None:
        self._completion.on_failed(failed)

    @property
    def token_budget(self) -> int:
        """Positions that the next step may have: fewer than configured for a while after memory ran out."""
        return self._state.token_budget.current()

    def on_dropped(self, dropped: StepDropped) -> None:
        self._completion.on_dropped(dropped)

    # ------------------------------------------------------------ the next step

    def plans_at(self) -> float | None:
        """Return when the next step is to be planned, by the clock; None: now, or once the running one has ended."""
        late_planning, running = self._state.late_planning, self._state.in_flight.running
        if late_planning is None or running is None:
            return None
        return late_planning.waits_until(running.total_positions)

    def next_action(self) -> Reserve | Outgoing | None:
        """Return what to do now: ask the block manager, send without asking, or nothing."""
        state = self._state
        self._asks_for_group = False
        is_full = len(state.in_flight) >= self.config.max_steps_in_flight
        if is_full or state.in_flight.is_broken or self.plans_at() is not None:
            proposal = NOTHING_PROPOSED
        elif state.retries.is_active:
            proposal = NOTHING_PROPOSED if len(state.in_flight) else self._propose_group()
        else:
            for sequence in state.running.giving_way(self._num_free_blocks + self._num_pinned_blocks):
                state.give_way(sequence)
            proposal = state.running.propose()
        if proposal.rows or proposal.candidates or state.cache_updates:
            return self._make_reserve(proposal)
        decodes = bool(proposal.decoding.sequences)
        if not decodes and not state.report.has_news:
            return None
        plan = self._plans.build(DecodeRows(proposal.decoding, proposal.most_positions, {}), None) if decodes else None
        return Outgoing(plan, self._make_report())

    def accept(self, granted: Granted) -> Outgoing:
        """Make the plan of the step that was asked for, and the report of earlier ones."""
        state = self._state
        decode_rows, self._decode_rows = self._decode_rows, NO_DECODE_ROWS
        for sequence_id in granted.preempted_ids:
            state.preempt(self.sequences[sequence_id])
        for sequence_id in granted.loading_ids:
            sequence = self.sequences[sequence_id]
            sequence.has_loaded = True
            state.waiting.set_loading(sequence)
        self._num_free_blocks = granted.num_free_blocks
        self._num_cached_blocks = granted.num_cached_blocks
        self._num_pinned_blocks = granted.num_pinned_blocks
        plan = (
            self._plans.build(decode_rows, granted) if decode_rows.decoding.sequences or granted.sequence_ids else None
        )
        state.report.write(granted)
        # rows that got nothing were preempted, or others are to be: fewer blocks were free than at the last grant
        replan = plan is None and self._asks_for_rows
        if plan is None and self._asks_for_group and not replan:
            state.retries.skip()  # there is no room for it now: it runs with all others again
            replan = True
        return Outgoing(plan, self._make_report(), replan)

    def _propose_group(self) -> Proposal:
        """Propose a step of the next group of a failed step's rows."""
        self._asks_for_group = True
        group, sequences = self._state.retries.group, self.sequences
        waiting = [s for sequence_id in group if (s := sequences[sequence_id]).status is Status.WAITING]
        return self._state.running.propose_group(group, waiting)

    def _make_reserve(self, proposal: Proposal) -> Reserve:
        running = self._state.running
        victim_ids = running.victims(proposal, self._num_free_blocks)
        if victim_ids:
            proposal = running.by_rank(proposal)
        decoding, rows, candidates = proposal.decoding, proposal.rows, proposal.candidates
        growing = {decoding.ids[index]: index for index in proposal.growing}
        self._decode_rows = DecodeRows(decoding, proposal.most_positions, growing)
        self._asks_for_rows = bool(rows)
        updates = self._state.take_cache_updates()
        filled = updates.filled
        return Reserve(
            step=self._plans.next_step,
            failed_steps=updates.failed_steps,
            committed_steps=updates.committed_steps,
            filled_sequence_ids=[f[0] for f in filled],
            filled_block_indexes=[f[1] for f in filled],
            filled_keys=[f[2] for f in filled],
            filled_parent_keys=[f[3] for f in filled],
            filled_token_ids=[f[4] for f in filled],
            free_sequence_ids=updates.freed_ids,
            row_ids=[s.id for s in rows],
            row_starts=[s.next_start for s in rows],
            row_counts=proposal.counts,
            victim_ids=victim_ids,
            candidate_ids=[s.id for s in candidates],
            candidate_num_tokens=[len(s.tokens) for s in candidates],
            candidate_num_prompt_tokens=[s.num_prompt_tokens for s in candidates],
            candidate_keys=[s.keys for s in candidates],
            candidate_root_keys=[s.root_key for s in candidates],
            candidate_token_ids=[s.known_tokens for s in candidates],
            token_budget=proposal.budget,
            candidate_chunk_limit=running.longest_chunk(),
            reset_prefix_cache=updates.resets_prefix_cache,
            broken_ids=updates.broken_ids,
            returned_ids=updates.returned_ids,
            shared_keys=updates.shared_keys,
            unread_ids=[s.id for s in candidates if not s.reads_cache],
            candidate_pins={s.id: s.pins for s in candidates if s.pins},
            candidate_peers={s.id: s.peer for s in candidates if s.peer is not None},
            candidate_images={s.id: s.whole_images for s in candidates if s.whole_images},
            completes_images=self._asks_for_group,
            candidate_tenants={s.id: s.tenant for s in candidates} if self.config.has_quotas else {},
            token_s=self._state.prefill_speed.token_s,
        )

    def _make_report(self) -> StepReport | None:
        report = self._state.report
        if not report.has_news:
            return None
        return report.flush(
            step=self._plans.next_step - 1,
            num_running=len(self._state.running),
            num_waiting=len(self._state.waiting),
            num_free_blocks=self._num_free_blocks,
            num_cached_blocks=self._num_cached_blocks,
            num_pinned_blocks=self._num_pinned_blocks,
        )
