"""The engine's decisions as a whole, under any sequence of events. Each property has a name:

whatever fits alone finishes, and accounts balance       TestEngine: `check_all_that_fit_finish` at its end
never write a shared or committed block                  TestEngine: at every grant and every plan
late rows are booked and emit nothing                    TestEngine: at every result
duplicate messages are no-ops                            TestDuplicates: every message is sent twice
preempt and resume change neither output nor cached      TestEngine: at every rule, and next to an engine that has room
no preemption for worse rank                             TestEngine: at every grant, and below for every alignment
a rejoin drops sequences and keeps committed blocks      TestEngine: `EngineBench.rejoin`, anywhere
positions that are not kept count nowhere                all, with a backend that yields several tokens a row
no chunk ends within an image that is computed whole     all: `EngineBench` at every plan
steps sent ahead change nothing                          TestAhead: everything above
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.waiting import Policy
from quipu.actors.messages.prompts import Breakpoint, CacheTtl
from quipu.actors.messages.scheduler import StepResult
from quipu.kernels.fake import Dials
from tests.actors.engine.ahead_bench import AheadBench
from tests.actors.engine.engine_bench import EngineBench
from tests.actors.engine.reported_sequences import Submission

POISON = 9
EOS = 5
TRUNKS = [[(7 * i + t) % 4 for i in range(40)] for t in range(3)]
PROMPTS = st.builds(
    lambda trunk, shared, own: trunk[:shared] + own,
    st.sampled_from(TRUNKS),
    st.integers(0, 40),
    st.lists(st.integers(0, 3), max_size=4),
).filter(bool)


MARKS = st.lists(st.builds(Breakpoint, st.integers(1, 40), st.sampled_from(CacheTtl)), max_size=3)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, failures and late results in any order, with pools that are too small."""

    bench_type = EngineBench

    @initialize(
        size=st.integers(1, 4),
        usable=st.integers(3, 16),
        max_num_seqs=st.sampled_from([1, 2, 3, 4, 6]),
        budget=st.sampled_from([1, 2, 3, 5, 8, 13, 32, 100]),
        in_flight=st.sampled_from([1, 2, 2, 3]),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.integers(0, 2),
        pinned_share=st.sampled_from([0.0, 0.5, 1.0]),
        eos_after=st.sampled_from([None, None, None, 0, 5]),
        policy=st.sampled_from(list(Policy)),
        threshold=st.sampled_from([0, 0, 1, 4]),
        sharing=st.booleans(),
        step_overhead_tokens=st.sampled_from([0, 0, 8]),
        first=st.lists(PROMPTS, min_size=1, max_size=5),
        max_tokens=st.integers(0, 20),
        most_tokens=st.sampled_from([1, 1, 2, 3, 4]),
        image=st.sampled_from([0, 0, 0, 2, 5, 11]),
    )
    def start(
        self,
        size: int,
        usable: int,
        max_num_seqs: int,
        budget: int,
        in_flight: int,
        caching: bool,
        watermark: int,
        pinned_share: float,
        eos_after: int | None,
        policy: Policy,
        threshold: int,
        sharing: bool,
        step_overhead_tokens: int,
        first: list[list[int]],
        max_tokens: int,
        most_tokens: int,
        image: int,
    ) -> None:
        self.capacity = size * usable
        self.reported: dict[int, int] = {}
        limits = SchedulerConfig(
            block_size=size,
            num_blocks=usable + 1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, image + max_num_seqs) if image else budget,
            max_model_len=60,
            whole_image_tokens=image,
            eos_token_ids=frozenset([EOS]),
            enable_prefix_caching=caching,
            max_steps_in_flight=in_flight,
            policy=policy,
            long_prefill_token_threshold=threshold,
        )
        # few different tokens, so that prompts can repeat sampled ones
        dials = Dials(
            poison_token_id=POISON,
            first_token_id=1,
            num_token_ids=3,
            eos_after=eos_after,
            eos_token_id=EOS,
            most_tokens=most_tokens,
        )
        self.bench = self.bench_type(
            limits,
            watermark=watermark,
            sharing=sharing,
            step_overhead_tokens=step_overhead_tokens,
            max_pinned_share=pinned_share,
            dials=dials,
        )
        for prompt in first:
            self.bench.submit(self.fit(prompt, max_tokens), max_tokens)

    def fit(self, prompt: list[int], max_tokens: int) -> list[int]:
        return prompt[: max(1, min(self.capacity, 60) - max_tokens)]

    def live(self) -> list[Submission]:
        return [submission for submission in self.bench.submissions.values() if not submission.terminal]

    # ------------------------------------------------------------ rules

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 20),
        seed=st.sampled_from([None, None, 1, 2**63]),
        domain=st.sampled_from("aaab"),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-2, 2),
        marks=MARKS,
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int | None,
        domain: str,
        num_choices: int,
        priority: int,
        marks: list[Breakpoint],
    ) -> None:
        prompt = self.fit(prompt, max_tokens)
        self.bench.submit(
            prompt,
            max_tokens,
            seed=seed,
            domain=domain,
            num_choices=num_choices,
            priority=priority,
            breakpoints=tuple(sorted((m for m in marks if m.position <= len(prompt)), key=lambda m: m.position)),
        )

    @precondition(lambda self: self.bench.submissions)
    @rule(data=st.data(), own=st.lists(st.integers(0, 3), max_size=3), max_tokens=st.integers(0, 8))
    def submit_next_turn(self, data: st.DataObject, own: list[int], max_tokens: int) -> None:
        """Submit a prompt that extends an earlier answer, which hits blocks that decoding filled."""
        submission = data.draw(st.sampled_from(list(self.bench.submissions.values())))
        self.bench.submit(
            self.fit(submission.prompt + submission.tokens + own, max_tokens), max_tokens, domain=submission.domain
        )

    @rule(prompt=PROMPTS, at=st.none() | st.integers(0, 20))
    def submit_trouble(self, prompt: list[int], at: int | None) -> None:
        """Submit a prompt that can never run and is refused with its own Terminal, or one that makes a pass raise."""
        if at is None:
            (submission,) = self.bench.submit(prompt, 1 + min(60, self.capacity))
            assert submission.terminal
            assert submission.error
            return
        prompt = self.fit(prompt, 2)
        prompt.insert(at, POISON)
        self.bench.submit(self.fit(prompt, 2), 2)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.abort(data.draw(st.sampled_from(self.live()), "sequence"))

    @rule(seconds=st.sampled_from([1, 299, 300, 3300, 3600]))
    def time_passes(self, seconds: int) -> None:
        """Advance the clock, which the next grant sees."""
        self.bench.now += seconds

    @rule()
    def reset(self) -> None:
        """Forget everything published; running sequences continue."""
        self.bench.reset_prefix_cache()

    @rule()
    def rejoin(self) -> None:
        """Lose the connection: sequences are dropped wherever they are, and what is committed stays."""
        self.bench.rejoin()

    @rule()
    def abort_ended(self) -> None:
        """Check that an Abort that arrives too late changes nothing."""
        self.bench.pump()  # sequences that were denied blocks are proposed again at the next opportunity
        self.bench.pump()  # and once more: a wake-up without a reason may change the scheduler's own state
        before = self.bench.state()
        for submission in list(self.bench.submissions.values()):
            if submission.terminal:
                self.bench.abort(submission)
        assert self.bench.state() == before

    @precondition(lambda self: self.bench.plans)
    @rule()
    def run(self) -> None:
        self.bench.run_one()

    @precondition(lambda self: self.bench.results)
    @rule()
    def handle(self) -> None:
        self.bench.handle_one()

    @rule(num_steps=st.integers(1, 12))
    def run_steps(self, num_steps: int) -> None:
        """Run steps without faults, each of them handled before the next is run."""
        for _ in range(num_steps):
            if self.bench.results:
                self.bench.handle_one()
            elif self.bench.plans:
                self.bench.step()

    @precondition(lambda self: self.bench.plans)
    @rule()
    def fail(self) -> None:
        """Make the next pass raise with half of its KV written."""
        self.bench.dials.fail_steps = 1

    @rule(limit=st.sampled_from([None, None, 1, 2, 7]))
    def limit_memory(self, limit: int | None) -> None:
        """From now on, passes over more tokens than this run out of memory."""
        self.bench.dials.max_tokens_in_memory = limit

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def deny(self, data: st.DataObject) -> None:
        """Grant nothing to one sequence in the next step, so that it may be only in the step after a failing one."""
        if self.bench.plans or self.bench.results:  # the end of a sequence makes the scheduler ask again
            self.bench.denied = {data.draw(st.sampled_from(self.live()), "sequence").id}

    # ------------------------------------------------------------ checks

    @invariant()
    def tokens_equal_those_of_a_run_alone(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check_tokens_so_far()

    @invariant()
    def preemption_does_not_change_cached(self) -> None:
        """What was reported at a sequence's first admission does not change."""
        if not hasattr(self, "bench"):
            return
        for submission in self.bench.submissions.values():
            if submission.cached is not None:
                first = self.reported.setdefault(submission.id, submission.cached)
                assert first == submission.cached, "cached has changed"

    def teardown(self) -> None:
        """Check that everything that fits finishes if nothing else happens; then no blocks are held and every account
        balances."""
        if hasattr(self, "bench"):
            self.bench.denied = set()
            self.bench.pump()
            self.bench.finish()
            self.bench.check_all_that_fit_finish()
            self.bench.check_at_rest()


class TwiceBench(EngineBench):
    """Handles every result and every Abort twice; the second time must change nothing."""

    def handle_one(self) -> StepResult:
        result = super().handle_one()
        self.duplicate_messages_are_no_ops(lambda: self.handle_again(result))
        return result

    def abort(self, submission: Submission) -> None:
        super().abort(submission)
        self.duplicate_messages_are_no_ops(lambda: EngineBench.abort(self, submission))

    def duplicate_messages_are_no_ops(self, repeat: Callable[[], object]) -> None:
        self.pump()  # a wake-up without a reason may change the scheduler's own state
        before = self.state()
        repeat()
        assert self.state() == before, "a duplicate message has changed something"


class Duplicates(EngineMachine):
    bench_type = TwiceBench
    bench: TwiceBench

    @precondition(lambda self: self.bench.handled)
    @rule(data=st.data())
    def handle_old_result(self, data: st.DataObject) -> None:
        """An older result is a duplicate too."""
        result = data.draw(st.sampled_from(self.bench.handled), "result")
        self.bench.duplicate_messages_are_no_ops(lambda: self.bench.handle_again(result))


@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=4),
    max_tokens=st.integers(4, 16),
    room=st.integers(0, 3),
    caching=st.booleans(),
    most_tokens=st.sampled_from([1, 2, 4]),
)
def test_preempt_and_resume_change_neither_output_nor_cached(
    prompts: list[list[int]], max_tokens: int, room: int, caching: bool, most_tokens: int
) -> None:
    """The same requests, run with hardly room for one and with room for all, have the same texts; a preemption does not
    change the `cached` that was reported."""
    num_needed = max(-(-(len(prompt) + max_tokens) // 4) for prompt in prompts)
    outcomes = []
    for usable in (num_needed + room, 200):
        limits = SchedulerConfig(
            block_size=4,
            num_blocks=usable + 1,
            max_num_seqs=4,
            max_num_batched_tokens=200,
            max_model_len=60,
            enable_prefix_caching=caching,
        )
        bench = EngineBench(limits, dials=Dials(most_tokens=most_tokens))
        submissions = [bench.submit(prompt, max_tokens)[0] for prompt in prompts]
        reported: dict[Any, Any] = {}
        while any(not submission.terminal for submission in submissions):
            bench.step()
            for submission in submissions:
                if submission.cached is not None:
                    reported.setdefault(submission.id, submission.cached)
        bench.check_at_rest()
        assert {submission.id: submission.cached for submission in submissions} == reported
        outcomes.append((submissions, [submission.tokens for submission in submissions]))
    (tight, tight_tokens), (roomy, roomy_tokens) = outcomes
    assert tight_tokens == roomy_tokens
    assert all(submission.num_preempted == 0 for submission in roomy)
    event("preempted" if any(submission.num_preempted for submission in tight) else "not preempted")


@settings(max_examples=max(10, settings.default.max_examples // 4))
@given(
    policy=st.sampled_from(Policy),
    budget=st.integers(6, 24),
    spare=st.integers(0, 3),
    most_tokens=st.sampled_from([1, 3]),
)
def test_no_preemption_for_worse_rank(policy: Policy, budget: int, spare: int, most_tokens: int) -> None:
    """A prompt of good rank is prefilled while others of worse rank grow, at every offset between their blocks."""
    size = 16
    for alignment in range(size):
        limits = SchedulerConfig(
            block_size=size,
            num_blocks=1 + 8 + spare,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=size * 8,
            policy=policy,
        )
        bench = EngineBench(limits, dials=Dials(most_tokens=most_tokens))
        for index in range(2):
            prompt = [index] * (size + alignment + index)
            bench.submit(prompt, 40, priority=1, domain="ab"[index])
        for _ in range(2 + alignment % 3):
            bench.step()
        bench.submit([3] * (size * 4 + 1), 40, priority=0, domain="b")
        bench.finish()
        bench.check_at_rest()


class Ahead(EngineMachine):
    """Each plan is launched before the one before it is collected, wherever the executor allows it."""

    bench_type = AheadBench


TestEngine = EngineMachine.TestCase
TestAhead = Ahead.TestCase
TestAhead.settings = settings(max_examples=max(80, settings.default.max_examples))
TestDuplicates = Duplicates.TestCase
TestDuplicates.settings = settings(max_examples=max(50, settings.default.max_examples))
TestEngine.settings = settings(max_examples=max(110, settings.default.max_examples))
