"""Steps launched behind the running one: the same texts, counts and tags as one by one, and nothing of them after a
failure.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import attrs
import pytest
from msgspec.structs import replace

from quipu.actors.engine.executor.launched_step import LaunchedStep
from quipu.actors.engine.executor.plan_queue import PlanQueue, run_plans
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.executor import Barrier, StepPlan
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed, StepResult
from quipu.kernels.fake import Dials, FakeFault
from tests.actors.engine.ahead_bench import AheadBench, LatePass
from tests.actors.engine.engine_bench import EngineBench
from tests.fake_oracle import continuation
from tests.processes import PATIENCE_S

LIMITS = SchedulerConfig(block_size=4, num_blocks=61, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
PROMPT = [1, 2, 3, 4, 5, 6]


def bench_of(limits: SchedulerConfig = LIMITS, **dials: Any) -> AheadBench:
    return AheadBench(limits, dials=Dials(**dials))


def tags_of(bench: EngineBench) -> list[tuple[bytes | None, int] | None]:
    """Return the contents of all blocks as the executor knows them."""
    found = [bench.executor.tags.tag_of(block) for block in range(LIMITS.num_blocks)]
    return [None if tag is None else (tag.key, tag.num_filled) for tag in found]


def test_decodes_are_launched_ahead() -> None:
    """Nearly every step of a decode is launched before the tokens of the last are known, and nothing else changes."""
    ahead, one_by_one = bench_of(), EngineBench(LIMITS)
    for bench in (ahead, one_by_one):
        for index in range(4):
            bench.submit([*PROMPT, index], 30 + index, seed=None if index % 2 else 7)
        bench.finish()
        bench.check_at_rest()
    assert [s.tokens for s in ahead.submissions.values()] == [s.tokens for s in one_by_one.submissions.values()]
    assert ahead.num_ahead > 25 and ahead.backend.most_running == 2
    assert tags_of(ahead) == tags_of(one_by_one)
    done = [[r for r in bench.handled if isinstance(r, StepDone)] for bench in (ahead, one_by_one)]
    assert [(d.row_ids, d.row_starts, d.row_ends) for d in done[0]] == [
        (d.row_ids, d.row_starts, d.row_ends) for d in done[1]
    ]


def test_output_positions() -> None:
    """A seeded row knows how many outputs it has drawn, that of the running step included: texts would differ."""
    bench = bench_of()
    (submission,) = bench.submit(PROMPT, 20, seed=3)
    bench.finish()
    assert bench.num_ahead > 10
    assert submission.tokens == bench.expected_tokens(submission)


@pytest.mark.parametrize("rules", [LogitRules(presence_penalty=1.0), LogitRules(min_tokens=3)])
def test_rows_with_rules_are_not_launched_ahead(rules: LogitRules) -> None:
    """Their next step needs the token. It is sent ahead again once they have ended."""
    bench = bench_of(applies_rules=True)
    bench.submit(PROMPT, 8, rules=rules)
    bench.submit([*PROMPT, 9], 30)
    while not bench.submissions[1].terminal:
        bench.step()
    assert bench.num_ahead <= 1, "only the step after the last one of the row with rules"
    bench.finish()
    bench.check_at_rest()
    assert bench.num_ahead > 10


def admission_behind(bench: AheadBench, *prompts: list[int]) -> tuple[LaunchedStep, StepPlan]:
    """Run a step behind which another is launched. Return that one, and a plan behind it that admits these prompts."""
    bench.run_one()
    for prompt in prompts:
        bench.submit(prompt, 4)
    bench.handle_one()
    bench.pump()
    running, admission = bench.plans
    assert bench.following is not None and bench.following.plan is running
    assert len(admission.admitted) == len(prompts) and not running.admitted
    return bench.following, admission


def test_admissions_are_launched_ahead() -> None:
    """What they read is confirmed before the tokens of the running step are known, if that step does not write it."""
    bench = bench_of()
    bench.submit(PROMPT, 30)
    _, admission = admission_behind(bench, [*PROMPT, 7, 8], [31, 32])
    assert admission.admitted[0].keys, "the first block is cached"
    bench.run_one()
    assert bench.following is not None and bench.following.plan is admission
    bench.finish()
    bench.check_at_rest()
    (done,) = (result for result in bench.handled if result.step == admission.step)
    assert isinstance(done, StepDone) and done.read_tokens == [4, 0]
    for submission in bench.submissions.values():
        assert submission.tokens == bench.expected_tokens(submission)


def test_failure_with_an_admission_behind_it() -> None:
    """What the step behind a failed one has admitted is taken back, slots included, and admitted again if it is still
    wanted."""
    bench = bench_of()
    bench.submit(PROMPT, 30)
    _, admission = admission_behind(bench, [*PROMPT, 7, 8], [31, 32], [33])
    running = next(one for one in bench.backend.launched if not one.over)
    running.outcome = FakeFault("late")
    assert isinstance(bench.run_one(), StepFailed) and bench.num_failed_before_another == 1
    gone = bench.submissions[4]
    bench.abort(gone)
    bench.finish()
    bench.submit(PROMPT, 8, num_choices=LIMITS.max_num_seqs)
    bench.finish()
    bench.check_at_rest()
    (dropped,) = (result for result in bench.handled if result.step == admission.step)
    assert isinstance(dropped, StepDropped)
    for submission in bench.submissions.values():
        assert submission is gone or submission.tokens == bench.expected_tokens(submission)


def test_admissions_that_wait_for_the_running_step() -> None:
    """For the tags of a block that it writes, for the end of a sequence that it has, or for a slot."""
    bench = bench_of()
    bench.submit(PROMPT, 30)
    step, admission = admission_behind(bench, [*PROMPT, 7, 8])
    assert bench.executor.may_follow(step, admission)
    (admit,) = admission.admitted
    cached, copied = admission.new_blocks[admit.sequence_id][0], LIMITS.num_blocks - 1
    known = replace(admit, sequence_id=step.plan.row_ids[0])
    for why, written, plan in (
        ("it writes what is read", cached, admission),
        ("it writes what is copied", copied, replace(admission, admitted=[replace(admit, copy_source=copied)])),
        ("it has the sequence", 0, replace(admission, admitted=[known])),
        ("the sequence is released behind it", 0, replace(admission, released_ids=[admit.sequence_id])),
    ):
        step.writes = [written]
        assert not bench.executor.may_follow(step, plan), why


def test_admission_without_a_slot() -> None:
    """A sequence that the same plan releases keeps its slot until the running step has ended."""
    bench = bench_of(attrs.evolve(LIMITS, max_num_seqs=2))
    gone, _ = bench.submit(PROMPT, 30, num_choices=2)
    bench.abort(gone)
    step, admission = admission_behind(bench, [41, 42])
    assert admission.released_ids and not bench.executor.may_follow(step, admission)
    bench.finish()
    bench.check_at_rest()


@pytest.mark.parametrize("late", [True, False])
def test_failure_with_a_step_behind_it(late: bool) -> None:
    """A step that fails, at its launch or later, takes the one behind it along: all sequences go on as before."""
    bench = bench_of()
    submissions = [bench.submit([*PROMPT, index], 24)[0] for index in range(3)]
    for at in range(60):
        if at % 7 == 3:
            bench.dials.fail_steps, bench.backend.next_is_late = 1, late
        if not bench.plans and not bench.results:
            break
        bench.step()
    bench.finish()
    bench.check_at_rest()
    assert any(isinstance(result, StepFailed) for result in bench.handled)
    if late:
        assert bench.num_failed_before_another > 0
        assert any(isinstance(result, StepDropped) for result in bench.handled)
    for submission in submissions:
        assert submission.tokens == continuation(submission.prompt, 24)


def test_sequence_that_the_step_behind_releases() -> None:
    """If the running step, which still has a row of it, fails, that row is taken back before its state is forgotten."""
    bench = bench_of(attrs.evolve(LIMITS, block_size=1))
    gone, stays = bench.submit(PROMPT, 24, num_choices=2)
    for _ in range(4):
        bench.step()
    bench.dials.fail_steps, bench.backend.next_is_late = 1, True
    bench.run_one()
    assert bench.following is not None, "the step that is going to fail"
    bench.abort(gone)
    bench.handle_one()
    bench.pump()
    running, releasing = bench.plans
    assert gone.id in running.new_blocks and gone.id in releasing.released_ids
    bench.run_one()
    assert bench.num_failed_before_another == 1
    bench.finish()
    bench.check_at_rest()
    assert stays.tokens == bench.expected_tokens(stays)


def test_block_of_an_ended_sequence() -> None:
    """A block that the step behind writes is not tagged with what the running step, one of whose rows had already
    ended, wrote to it before."""
    limits = attrs.evolve(LIMITS, num_blocks=7, max_num_seqs=2)
    for max_tokens in range(1, 12):
        bench = bench_of(limits)
        bench.submit([1, 2, 3], max_tokens, stop_token_ids=(continuation([1, 2, 3], 30)[max_tokens // 2],))
        bench.submit([4, 5], 16)
        while bench.plans or bench.results:
            bench.step()
            if bench.following is not None:
                assert all(bench.executor.tags.tag_of(block) is None for block in bench.following.writes)
        bench.check_at_rest()


# ---------------------------------------------------------------- the executor's thread


@attrs.define(eq=False)
class Thread:
    """`run_plans` in a thread, fed by hand."""

    bench: AheadBench
    work: PlanQueue = attrs.field(factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[StepResult | int] = attrs.field(factory=queue.SimpleQueue)

    thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        def run() -> None:
            run_plans(
                self.bench.executor, self.work, self.answers.put, lambda barrier: self.answers.put(barrier.number)
            )

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def send(self) -> None:
        """Send the next plan."""
        self.work.put(self.bench.plans.popleft())

    def handle(self) -> StepResult:
        """Let the scheduler handle the next result."""
        result = self.answers.get(timeout=PATIENCE_S)
        assert not isinstance(result, int)
        self.bench.results.append(result)
        return self.bench.handle_one()

    def wait_for_launches(self, count: int) -> LatePass:
        """Wait until this many passes have been launched; return the oldest that is not over."""
        while self.bench.backend.num_passes < count:
            self.thread.join(0.001)
            assert self.thread.is_alive()
        return next(one for one in self.bench.backend.launched if not one.over)


def test_thread_launches_the_next_plan_while_one_runs() -> None:
    """It answers for a pass as soon as the next one is launched, without a word that the first is over."""
    bench = bench_of()
    (submission,) = bench.submit(PROMPT, 12)
    thread = Thread(bench)
    while bench.num_sent:
        while bench.plans:
            thread.send()
        if bench.num_sent == 1:  # the last one: no other comes
            thread.wait_for_launches(len(bench.handled) + 1).over = True
        thread.handle()
    thread.work.put(None)
    thread.thread.join(PATIENCE_S)
    assert not thread.thread.is_alive()
    assert submission.tokens == continuation(PROMPT, 12) and bench.backend.most_running == 2
    assert bench.executor.running_step is None


def test_barrier_waits_for_the_running_pass() -> None:
    """It is passed after the answers of all plans before it."""
    bench = bench_of()
    bench.submit(PROMPT, 12)
    thread = Thread(bench)
    thread.send()
    thread.wait_for_launches(1)
    thread.work.put(Barrier(5))
    running = thread.wait_for_launches(1)
    assert thread.answers.empty()
    running.over = True
    assert isinstance(thread.answers.get(timeout=PATIENCE_S), StepDone)
    assert thread.answers.get(timeout=PATIENCE_S) == 5
    thread.work.put(None)
    thread.thread.join(PATIENCE_S)


def test_plan_after_a_failed_launch() -> None:
    """A plan behind one whose launch raised is dropped without a pass."""
    bench = bench_of()
    bench.submit(PROMPT, 12)
    for _ in range(3):
        bench.step()
    first, second = bench.plans[0], bench.plans[1] if len(bench.plans) > 1 else None
    assert second is not None
    bench.dials.fail_steps, bench.backend.next_is_late = 1, False
    step = bench.executor.launch(first)
    assert isinstance(step.error, FakeFault) and step.is_over()
    assert not bench.executor.may_follow(step, second)
    assert isinstance(bench.executor.finish(step), StepFailed)
    assert isinstance(bench.executor.run(second), StepDropped)
