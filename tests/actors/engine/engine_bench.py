"""The whole engine without an event loop: batcher, block manager and executor on the fake backend, driven by hand.

A test decides what happens next (a submit, an abort, the executor runs one plan, the scheduler handles one result). The
bench does what the scheduler's actor would do, and checks at every step what must always hold of the engine. Its
reports are checked in `reported_sequences.py`.
"""

from __future__ import annotations

import operator
from collections import deque
from pathlib import Path

import attrs
from msgspec.structs import replace

from quipu.actors.accountant.account import Account
from quipu.actors.engine.block_manager.lower_tier import LowerTier, TierPlan
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.executor.fake_drafter import FakeDrafter
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.planning import Batcher
from quipu.actors.engine.scheduler.sequence import Sequence, Status
from quipu.actors.messages.accountant import OpenAccount, StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.prompts import Breakpoint
from quipu.actors.messages.sampling import LogitRules, OutputGrammar, SamplingParams
from quipu.actors.messages.scheduler import Granted, StepDone, StepDropped, StepFailed, StepResult, Submit
from quipu.actors.request_desk.mailbox import Mailbox
from quipu.actors.shared.block_keys import chain_image_keys
from quipu.actors.shared.breakpoints import in_whole_blocks, pins_of
from quipu.kernels.backend import BackendConfig
from quipu.kernels.fake import Dials, FakeBackend
from quipu.kernels.step_types import PromptImage
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import reused_of, root_of
from tests.actors.engine.reported_sequences import ReportedSequences, SentPlan, Submission
from tests.actors.key_reader import KeyReader, committed_in, split
from tests.actors.properties import check_writes_are_private


def num_positions(plan: StepPlan) -> int:
    """Return the maximum number of positions that the rows of a plan may compute."""
    return plan.num_going_on * plan.most_positions + sum(plan.chunk_counts)


def backend_config(limits: SchedulerConfig) -> BackendConfig:
    """Return the config of a backend for these limits, which reads no checkpoint."""
    return BackendConfig(
        model_path=Path(),
        dtype="auto",
        load_format="auto",
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def images_of(prompt: list[int], num_tokens: int) -> tuple[PromptImage, ...]:
    """Return the images of a prompt, up to two of so many tokens, as far as it has room for them; 0: none."""
    starts = (2, 2 + num_tokens) if num_tokens else ()  # one right behind the other
    return tuple(
        PromptImage(bytes([start]) * 32, b"", 1, 1, num_tokens, start)
        for start in starts
        if start + num_tokens <= len(prompt)
    )


class EngineBench(ReportedSequences):
    backend_type: type[FakeBackend] = FakeBackend

    def __init__(
        self,
        limits: SchedulerConfig,
        *,
        watermark: int = 0,
        sharing: bool = False,
        step_overhead_tokens: int = 0,
        max_pinned_share: float = 0.5,
        dials: Dials | None = None,
    ) -> None:
        dials = dials or Dials()
        super().__init__(attrs.evolve(limits, most_positions=dials.most_tokens), dials)
        limits = self.limits
        self.batcher = Batcher(limits, lambda: self.now)
        self.manager = BlockManager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            share_pending_prefixes=sharing,
            step_overhead_tokens=step_overhead_tokens,
            watermark_blocks=watermark,
            max_pinned_share=max_pinned_share,
            tiers=TierPlan(self.make_tiers(limits), num_stored_ahead=limits.num_blocks // 2),
        )
        self.now = 0.0
        """The time by which pins, and a lowered token budget, expire."""
        backend = self.backend_type(backend_config(limits), self.dials)
        self.executor = Executor(backend, max_num_seqs=limits.max_num_seqs, drafter=FakeDrafter(backend))
        self.plans: deque[StepPlan] = deque()
        """Sent, but not run yet."""
        self.results: deque[StepResult] = deque()
        """Run, but not handled yet."""
        self.handled: list[StepResult] = []
        self.denied: set[int] = set()
        """Running sequences to which the block manager grants nothing in the next step."""
        self._reader = KeyReader()
        self._next_id = 1

    def make_tiers(self, limits: SchedulerConfig) -> list[LowerTier]:
        """Return the tiers below the device."""
        return []

    # ------------------------------------------------------------ actions of tests

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int | None = None,
        domain: str = "a",
        num_choices: int = 1,
        ignore_eos: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        breakpoints: tuple[Breakpoint, ...] = (),
        rules: LogitRules | None = None,
        grammar: OutputGrammar | None = None,
        prediction: tuple[int, ...] = (),
    ) -> list[Submission]:
        """Submit one request of `num_choices` sequences. `seed` None means greedy sampling."""
        account = Account(OpenAccount(f"r{self._next_id}", "test", 0.0, Mailbox()), 0.0)
        self.accounts.append(account)
        size = self.limits.block_size
        submissions = []
        for choice in range(num_choices):
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if seed is None else 1.0,
                seed=0 if seed is None else seed + choice,
                ignore_eos=ignore_eos,
                stop_token_ids=stop_token_ids,
                rules=rules,
                grammar=grammar,
                prediction=prediction,
            )
            submission = Submission(self._next_id, account, domain, prompt, sampling)
            self._next_id += 1
            account.add_sequence(submission.id, 0, choice, len(prompt), in_whole_blocks(breakpoints, size))
            self.submissions[submission.id] = submission
            submissions.append(submission)
            root, images = root_of(domain, size), images_of(prompt, self.limits.whole_image_tokens)
            keys = chain_image_keys(root, prompt, size, images, 0) if self.limits.enable_prefix_caching else []
            pins = pins_of(breakpoints, size) if self.limits.enable_prefix_caching else ()
            self.batcher.submit(
                Submit(submission.id, list(prompt), root, keys, sampling, domain, priority, pins=pins, images=images)
            )
        self.pump()
        return submissions

    def reset_prefix_cache(self) -> None:
        self.batcher.reset_prefix_cache()
        self.pump()

    def abort(self, submission: Submission) -> None:
        if not submission.terminal and submission.reason is None:
            submission.aborted = True
        self.batcher.abort(submission.id)
        self.pump()

    def rejoin(self) -> None:
        """Do what an engine does once it has lost its connection: drop all sequences, in whatever state they are."""
        committed = self.manager.pool.state().committed_keys()
        pinned = [(pin.key, pin.blocks, pin.expires_at) for pin in self.manager.pins.prefixes()]
        self.plans.clear()
        self.results.clear()
        self.handled.clear()
        self._sent.clear()
        self._spans.clear()
        self._drafts.clear()
        self.denied.clear()
        self.executor.drop_sequences()
        self.manager.drop_sequences()
        self.batcher = Batcher(self.limits, lambda: self.now)
        check_manager(self.manager)
        assert self.manager.pool.state().committed_keys() == committed, "a rejoin changes what is committed"
        assert self.manager.pool.state().pending == {} and self.manager.pins.num_marks == 0
        assert [(pin.key, pin.blocks, pin.expires_at) for pin in self.manager.pins.prefixes()] == pinned
        lost = {submission.id for submission in self.submissions.values() if not submission.terminal}
        self.submissions = {i: submission for i, submission in self.submissions.items() if i not in lost}
        self.accounts = [account for account in self.accounts if lost.isdisjoint(account.sequences)]
        num_reports = len(self.reports)
        self.batcher.announce_keys()
        self.pump()
        if self.limits.enable_prefix_caching:
            (report,) = self.reports[num_reports:]
            assert report.number == 1 and report.is_cleared and not report.removed_keys
            assert {*split(report.stored_keys)} == self.findable_keys()
        pool = self.manager.pool
        assert pool.num_free + pool.num_pinned_only + 1 == self.limits.num_blocks

    def run_one(self) -> StepResult:
        """Let the executor run the next plan."""
        result = self.executor.run(self.plans.popleft())
        self.results.append(result)
        return result

    def handle_one(self) -> StepResult:
        """Let the scheduler handle the next result."""
        result = self.results.popleft()
        plan = self._sent[0].plan
        late = self.late_rows(plan)
        self._expect(result)
        num_reports = len(self.reports)
        self.handle_again(result)
        self.handled.append(result)
        if isinstance(result, StepDone):
            self.check_late_rows_are_booked_without_tokens(result, late, self.reports[num_reports:])
        return result

    def late_rows(self, plan: StepPlan) -> list[int]:
        """Return the rows whose sequences have ended or lost their blocks since the plan was sent."""
        late = []
        step = self.batcher._state.in_flight._sent[0]
        assert step.plan is plan
        for row, (sequence_id, epoch) in enumerate(zip(plan.row_ids, step.epochs, strict=True)):
            sequence = self.batcher.sequences.get(sequence_id)
            if sequence is None or sequence.status is not Status.RUNNING or sequence.epoch != epoch:
                late.append(row)
        return late

    def check_late_rows_are_booked_without_tokens(
        self, done: StepDone, late: list[int], reports: list[StepReport]
    ) -> None:
        """Check that a late row's span is in the next report, but not its token, nor an end that the token would have
        caused."""
        for row in late:
            sequence_id = done.row_ids[row]
            spans = [s for r in reports for s in zip(r.span_ids, r.span_starts, r.span_ends, strict=True)]
            assert (sequence_id, done.row_starts[row], done.row_ends[row]) in spans, "a row that ran is not booked"
            assert not any(sequence_id in r.token_sequence_ids for r in reports), "a void token is emitted"
            assert not any(sequence_id in r.ended_ids for r in reports)

    def handle_again(self, result: StepResult) -> None:
        match result:
            case StepDone():
                self.batcher.on_done(result)
            case StepFailed():
                self.batcher.on_failed(result)
            case StepDropped():
                self.batcher.on_dropped(result)
        self.pump()

    def step(self) -> StepResult:
        """Run one plan and handle its result."""
        self.run_one()
        return self.handle_one()

    def finish(self) -> None:
        """Run until nothing is left. Raises AssertionError if the engine is stuck or never stops."""
        work = sum(len(submission.prompt) + submission.sampling.max_tokens for submission in self.submissions.values())
        for _ in range(100 + 4 * work * max(1, len(self.submissions))):
            if self.results:
                self.handle_one()
            elif self.plans:
                self.run_one()
            else:
                break
        else:
            raise AssertionError("the engine never stops taking steps")
        left = [submission.id for submission in self.submissions.values() if not submission.terminal]
        assert not left, f"the engine is stuck: nothing runs, but {left} have not ended"

    @property
    def is_broken(self) -> bool:
        """Whether a step has failed and the results of those after it are still awaited."""
        return self.batcher._state.in_flight.is_broken

    @property
    def is_searching(self) -> bool:
        """Whether a failed step is being run again in groups."""
        return self.batcher._state.retries.is_active

    def reserve_blocks(self, num_blocks: int) -> None:
        """Keep this many blocks free at each admission from now on."""
        self.manager._admissions.watermark_blocks = num_blocks

    # ------------------------------------------------------------ the scheduler's actor

    def pump(self) -> None:
        batcher = self.batcher
        while (action := batcher.next_action()) is not None:
            reused: dict[int, int] = {}
            if isinstance(action, Reserve):
                granted = self.manager.grant(self._deny(action), self.now)
                check_manager(self.manager)
                self._check_grant(granted)
                outgoing = batcher.accept(granted)
                reused = dict(reused_of(granted))
            else:
                outgoing = action
            plan, report = outgoing.plan, outgoing.report
            self._check_keys(report)
            if plan is not None:
                self._check_plan(plan)
                self.plans.append(plan)
                self._sent.append(SentPlan(plan, reused))
            if report is not None:
                self._hear_report(report)
            if plan is None and not outgoing.replan:
                break

    def _check_keys(self, report: StepReport | None) -> None:
        """Check that a reader that applies the reports has the committed keys after each that changes them."""
        if report is not None and (report.stored_keys or report.removed_keys or report.is_cleared):
            assert self.limits.enable_prefix_caching
            self._reader.apply(report)
            assert self._reader.keys == self.findable_keys(), "the reports and the cache differ"

    def findable_keys(self) -> set[bytes]:
        """Return the prefixes of all keys that can be found, in any tier."""
        return committed_in(self.manager.pool)

    def _deny(self, proposal: Reserve) -> Reserve:
        """Remove the denied sequences from a Reserve, as if the block manager had granted them nothing."""
        denied, self.denied = self.denied, set()
        kept = [i for i, sequence_id in enumerate(proposal.row_ids) if sequence_id not in denied]
        return replace(
            proposal,
            row_ids=[proposal.row_ids[i] for i in kept],
            row_starts=[proposal.row_starts[i] for i in kept],
            row_counts=[proposal.row_counts[i] for i in kept],
        )

    def _check_grant(self, granted: Granted) -> None:
        self.check_no_preemption_for_worse_rank(granted)
        for sequence_id in granted.preempted_ids:
            submission = self.submissions[sequence_id]
            submission.num_preempted += 1
        check_writes_are_private(self.manager, granted)

    def check_no_preemption_for_worse_rank(self, granted: Granted) -> None:
        """After a preemption, every sequence still running has a better rank than those preempted."""
        if granted.preempted_ids:
            rank = self.batcher._state.waiting.rank
            lost = min(rank(self.batcher.sequences[i]) for i in granted.preempted_ids)
            kept = [rank(s) for s in self.batcher._state.running if s.id not in granted.preempted_ids]
            assert all(other < lost for other in kept), "a sequence is preempted in favour of one of worse rank"

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        assert 0 < num_positions(plan) <= limits.max_num_batched_tokens
        assert min(plan.chunk_counts, default=1) > 0 and plan.most_positions > 0
        assert plan.num_going_on + len(plan.chunk_counts) == len(plan.row_ids)
        assert plan.new_blocks.keys() <= set(plan.row_ids)
        assert len(set(plan.row_ids)) == len(plan.row_ids) <= limits.max_num_seqs
        assert len(self.manager.allocations) <= limits.max_num_seqs
        assert len(self._sent) < limits.max_steps_in_flight
        assert {admit.sequence_id for admit in plan.admitted} <= set(plan.row_ids[plan.num_going_on :])
        assert not any(self.submissions[i].terminal for i in plan.row_ids), "an ended sequence is planned"
        for i, start, count in zip(
            plan.row_ids[plan.num_going_on :], plan.chunk_starts, plan.chunk_counts, strict=True
        ):
            images = images_of(self.submissions[i].prompt, limits.whole_image_tokens)
            assert not any(image.start < start + count < image.end for image in images), "a chunk ends within an image"

    # ------------------------------------------------------------ checks at any time

    def state(self) -> dict[str, object]:
        """Return the whole state of the scheduler and the block manager, and what they have sent."""
        batcher, pool = self.batcher, self.manager.pool
        state, updates = batcher._state, batcher._state.cache_updates
        return {
            "sequences": {i: _snapshot(s) for i, s in batcher.sequences.items()},
            "running": [s.id for s in state.running],
            "waiting": [s.id for s in state.waiting.first(len(state.waiting))],
            "in flight": [(s.plan.step, s.failed) for s in state.in_flight._sent],
            "broken": [s.plan.step for s in state.in_flight._broken],
            "generation": state.in_flight.generation,
            "retries": [dict(group) for group in state.retries._groups],
            "token budget": batcher.token_budget,
            "updates": [
                list(getattr(updates, name)) for name in ("committed_steps", "failed_steps", "filled", "freed_ids")
            ],
            "tables": {i: list(h.table) for i, h in self.manager.allocations.items()},
            "pool": pool.state(),
            "pinned": [(list(pin.blocks), pin.expires_at) for pin in self.manager.pins.prefixes()],
            "sent": [len(self.plans), len(self._sent), len(self.reports), batcher._plans.next_step],
        }

    # ------------------------------------------------------------ checks at the end

    def check_at_rest(self) -> None:
        """Check that everything has ended, all blocks are free or pinned, and all accounts balance."""
        assert self.batcher.sequences == {}
        assert self.manager.allocations == {}
        pool = self.manager.pool
        assert pool.num_free + pool.num_pinned_only == self.limits.num_blocks - 1
        assert self.manager.pins.num_marks == 0
        self.check_tokens_so_far()
        for submission in self.submissions.values():
            assert submission.terminal
            assert submission.reason is None or submission.error is None
            assert submission.reason is not None or submission.error is not None or submission.aborted, (
                "a sequence ended without a cause"
            )
            if submission.reason is not None:
                assert submission.tokens == self.expected_tokens(submission)
        for account in self.accounts:
            self._check_account(account)


OWN_FIELDS = [field.name for field in attrs.fields(Sequence) if not field.name.startswith("_")]
SEQUENCE_FIELDS = operator.attrgetter(*OWN_FIELDS, "next_start", "last_step")
"""Positions as numbers: the object that counts the advance of several sequences changes."""


def _snapshot(sequence: Sequence) -> list[object]:
    """Return the fields of a sequence and copies of its lists; everything else in it is immutable."""
    return [list(value) if isinstance(value, list) else value for value in SEQUENCE_FIELDS(sequence)]
