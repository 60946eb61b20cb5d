"""An engine whose device is a clock: the real Batcher and BlockManager, and an executor that only reports completion.

Used by `trace_replay`, `sharing`, `engine_core`, `routing` and `apart`; hides the columns of the engine's messages from
them.

    submit ─▶ pump: next_action ─▶ grant ─▶ accept ─▶ plans      (timed; not every step asks the block manager)
                ▲                                    │
                └── finish_step: on_done (timed) ◀───┘ answer (not timed)

What must always hold: no decision is made here, and everything between two clock readings is quipu's own code.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import attrs

from quipu.actors.engine.block_manager.lower_tier import TierPlan
from quipu.actors.engine.block_manager.pending import STEP_OVERHEAD_TOKENS
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.planning import Batcher, Outgoing
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.peers import Peer
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import StepDone, Submit

FILLED_COLUMNS = [name for name in Reserve.__annotations__ if name.startswith("filled_")]
clock = time.perf_counter_ns


@attrs.frozen
class Job:
    """One request. Its first `num_prompt_tokens` tokens are the prompt; the others are outputs known in advance."""

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    keys: list[bytes]
    """Chain keys of the prompt's full blocks."""
    max_tokens: int
    """Outputs to sample, one per step; at least 1."""
    root_key: bytes = bytes(32)


@attrs.frozen
class PassCosts:
    """The virtual time of a pass."""

    step_s: float = 0.010
    token_s: float = 20e-6

    def seconds(self, plan: StepPlan) -> float:
        return self.step_s + self.token_s * (plan.num_going_on + sum(plan.chunk_counts))


@attrs.frozen
class StepTime:
    """Nanoseconds of one step, from receiving the previous result to having the plan."""

    scheduler_ns: int
    manager_ns: int


def draw_zeros(count: int) -> list[int]:
    return [0] * count


def admit_start(plan: StepPlan, sequence_id: int) -> int:
    """Return where the chunk of a sequence starts: behind what it was granted."""
    return plan.chunk_starts[plan.row_ids.index(sequence_id) - plan.num_going_on]


class SimulatedEngine:
    """Batcher and block manager, driven by hand."""

    def __init__(
        self,
        limits: SchedulerConfig,
        *,
        share_pending_prefixes: bool = True,
        step_overhead_tokens: int = STEP_OVERHEAD_TOKENS,
        watermark: float = 0.01,
        cache_outputs: bool = True,
        explain_misses: bool = True,
        draw: Callable[[int], list[int]] = draw_zeros,
        tiers: TierPlan | None = None,
    ) -> None:
        """Create an engine; defaults are the server's, `watermark` is a fraction of the blocks.

        With `cache_outputs` False, blocks that hold a token after the prompt get no key. The moves of `tiers` are the
        caller's to carry out.
        """
        self.limits = limits
        self.batcher = Batcher(limits)
        self.manager = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            share_pending_prefixes=share_pending_prefixes,
            step_overhead_tokens=step_overhead_tokens,
            explain_misses=explain_misses,
            watermark_blocks=math.ceil(watermark * limits.num_blocks),
            tiers=tiers,
        )
        self.plans: deque[StepPlan] = deque()
        """Sent but not yet answered; oldest first."""
        self.step_times: list[StepTime] = []
        self.scheduler_ns = 0
        self.manager_ns = 0
        self.reused: dict[int, int] = {}
        """Prompt tokens found in the cache at each request's first admission, once its step was done."""
        self.rejected: set[int] = set()
        self.num_open = 0
        self.num_preemptions = 0
        self.most_running = 0
        self.on_tokens: Callable[[list[int]], object] | None = None
        """Called with the sequences of the tokens of a report."""
        self._cache_outputs = cache_outputs
        self._draw = draw
        self._jobs: dict[int, Job] = {}
        """Open requests: what they hold is released outside the timers."""
        self._num_sampled: dict[int, int] = {}
        """Outputs that were known when a request came, if any."""
        self.positions: dict[int, int] = {}
        """By sequence, how many tokens the steps that are done have computed or found."""
        self._lengths: dict[int, tuple[int, int]] = {}
        """Tokens known at its admission and the most tokens, by sequence."""
        self._before = StepTime(0, 0)

    def submit(self, job: Job, *, num_sampled: int = 0, peer: Peer | None = None, leaves: bool = False) -> None:
        """Queue a request. `num_sampled` of its outputs were sampled elsewhere, by `peer` if its blocks can be fetched.

        If it `leaves`, it ends here with its first token.
        """
        message = Submit(
            sequence_id=job.id,
            prompt_token_ids=job.token_ids,
            root_key=job.root_key,
            block_keys=job.keys,
            sampling=SamplingParams(max_tokens=job.max_tokens, ignore_eos=True),
            is_resumed=bool(num_sampled),
            output_token_ids=self._draw(num_sampled),
            ends_after_prefill=leaves,
            peer=peer,
        )
        self._jobs[job.id] = job
        if num_sampled:
            self._num_sampled[job.id] = num_sampled
        self.num_open += 1
        began = clock()
        self.batcher.submit(message)
        self.scheduler_ns += clock() - began

    def pump(self) -> None:
        """Plan steps until there is nothing left to plan, as the scheduler's actor does after reading its messages."""
        while True:
            began = clock()
            action = self.batcher.next_action()
            self.scheduler_ns += clock() - began
            if action is None:
                return
            outgoing = self._ask(action) if isinstance(action, Reserve) else action
            plan, report = outgoing.plan, outgoing.report
            if report is not None:
                self._apply(report)
            if plan is not None:
                self.plans.append(plan)
                before, self._before = self._before, StepTime(self.scheduler_ns, self.manager_ns)
                self.step_times.append(
                    StepTime(self.scheduler_ns - before.scheduler_ns, self.manager_ns - before.manager_ns)
                )
            elif not outgoing.replan:
                return

    def _ask(self, proposal: Reserve) -> Outgoing:
        """Return what to send."""
        if not self._cache_outputs:
            self._cut_to_prompts(proposal)
        a = clock()
        granted = self.manager.grant(proposal)
        b = clock()
        outgoing = self.batcher.accept(granted)
        self.scheduler_ns += clock() - b
        self.manager_ns += b - a
        return outgoing

    def finish_step(self) -> StepDone:
        """Complete the oldest plan. Returns what its executor reports."""
        done = self.answer(self.plans.popleft())
        began = clock()
        self.batcher.on_done(done)
        self.scheduler_ns += clock() - began
        return done

    def answer(self, plan: StepPlan) -> StepDone:
        """Return what an executor reports about a plan that it has run."""
        for admit in plan.admitted:
            self._lengths[admit.sequence_id] = (len(admit.tokens), admit.max_len)
        going_on, chunks = plan.row_ids[: plan.num_going_on], plan.row_ids[plan.num_going_on :]
        starts = [self.positions[sequence_id] for sequence_id in going_on] + plan.chunk_starts
        ends = [start + 1 for start in starts[: plan.num_going_on]]
        num_tokens = [1] * plan.num_going_on
        for sequence_id, start, count in zip(chunks, plan.chunk_starts, plan.chunk_counts, strict=True):
            num_known, max_len = self._lengths[sequence_id]
            ends.append(start + count)
            num_tokens.append(int(start + count == num_known < max_len))
        self.positions.update(zip(plan.row_ids, ends, strict=True))
        return StepDone(
            step=plan.step,
            generation=plan.generation,
            row_ids=plan.row_ids,
            row_starts=starts,
            row_ends=ends,
            token_ids=self._draw(sum(num_tokens)),
            num_tokens=[] if all(num_tokens) else num_tokens,
            read_ids=[admit.sequence_id for admit in plan.admitted],
            read_tokens=[admit_start(plan, admit.sequence_id) for admit in plan.admitted],
            seconds=0.0,
        )

    def _cut_to_prompts(self, proposal: Reserve) -> None:
        """Remove keys and candidates' tokens beyond the prompt from what the block manager is sent.

        Tokens beyond the prompt follow as rows of the next steps, as they do for a long prompt; those that were known
        when the request came stay, unless they fill a block.
        """
        for name in FILLED_COLUMNS:
            getattr(proposal, name).clear()
        for index, sequence_id in enumerate(proposal.candidate_ids):
            num_prompt_tokens = self._jobs[sequence_id].num_prompt_tokens
            num_kept = num_prompt_tokens + self._num_sampled.get(sequence_id, 0)
            num_full = num_prompt_tokens // self.limits.block_size
            if num_kept // self.limits.block_size > num_full:
                num_kept = num_prompt_tokens
            if len(proposal.candidate_keys[index]) > num_full:
                proposal.candidate_keys[index] = proposal.candidate_keys[index][:num_full]
            if proposal.candidate_num_tokens[index] > num_kept:
                proposal.candidate_num_prompt_tokens[index] = num_prompt_tokens
                proposal.candidate_num_tokens[index] = num_kept

    def _apply(self, report: StepReport) -> None:
        for sequence_id, number, reused in zip(
            report.admitted_ids, report.admitted_number, report.admitted_reused, strict=True
        ):
            if number == 1:
                self.reused[sequence_id] = reused
        for sequence_id, error in zip(report.terminal_ids, report.terminal_errors, strict=True):
            self.num_open -= 1
            del self._jobs[sequence_id]
            self._num_sampled.pop(sequence_id, None)
            if error is not None:
                self.rejected.add(sequence_id)
        if self.on_tokens is not None:
            self.on_tokens(report.token_sequence_ids)
        self.num_preemptions += report.num_preempted
        self.most_running = max(self.most_running, report.num_running)
