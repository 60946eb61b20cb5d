"""Steps that raise are run again in halves: how many passes that takes, which sequences fail, and what remains."""

from __future__ import annotations

import math
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.step_retries import Retries
from quipu.actors.messages.outcomes import ErrorKind
from quipu.actors.messages.scheduler import StepDone, StepFailed
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import Dials
from tests.actors.engine.engine_bench import EngineBench, num_positions
from tests.actors.engine.reported_sequences import Submission

POISON = 7
LIMITS = SchedulerConfig(block_size=4, num_blocks=400, max_num_seqs=33, max_num_batched_tokens=512, max_model_len=100)


def prompts_of(count: int, length: int = 9) -> list[list[int]]:
    """Return prompts without a common first block."""
    return [[10 + index, *range(100, 99 + length)] for index in range(count)]


def admitted_together(bench: EngineBench, prompts: list[list[int]]) -> list[Submission]:
    """Submit these prompts while two steps are in flight, and advance to the next step, which admits all of them."""
    bench.submit([1], 2)
    submissions = [bench.submit(prompt, 5)[0] for prompt in prompts]
    bench.step()
    bench.step()
    assert bench.plans[0].row_ids == [submission.id for submission in submissions]
    return submissions


def fail_once(bench: EngineBench) -> None:
    """Run until a step has failed and those after it are dropped."""
    while not isinstance(bench.step(), StepFailed):
        pass
    while bench.is_broken:
        bench.step()


def passes_of_the_search(bench: EngineBench) -> int:
    """Run until the search after the first failed step is over, and return how many passes it took."""
    fail_once(bench)
    num_passes = 0
    while bench.is_searching:
        assert len(bench.plans) <= 1, "the passes of a search must not overlap"
        if not isinstance(bench.step(), StepDone | StepFailed):
            raise AssertionError("a pass of a search is dropped")
        num_passes += 1
    return num_passes


@pytest.mark.parametrize("most_tokens", [1, 4])
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 32])
def test_one_culprit_is_found(count: int, decoding: bool, most_tokens: int) -> None:
    """Wherever the culprit is, at most 2 log2(n) + 2 passes find it; all others get their usual tokens, and nothing of
    theirs is computed twice."""
    for culprit in range(count):
        bench = EngineBench(LIMITS, dials=Dials(poison_token_id=None if decoding else POISON, most_tokens=most_tokens))
        prompts = prompts_of(count)
        prompts[culprit] = [*prompts[culprit], POISON]
        submissions = admitted_together(bench, prompts)
        if decoding:
            at = 2 if most_tokens == 1 else 1  # with several tokens a step, the poisoned one may be anywhere in a run
            while len(submissions[culprit].tokens) < at:
                bench.step()
            bench.dials.poison_token_id = bench.expected_tokens(submissions[culprit])[at + 1]
            others = [s for s in submissions if bench.dials.poison_token_id in bench.expected_tokens(s)[:-1]]
            if len(others) > 1:
                continue  # drawn by another as well
        assert passes_of_the_search(bench) <= 2 * math.log2(count) + 2
        if most_tokens == 1:  # otherwise shorter runs may have ended the search before the poisoned token
            bench.dials.poison_token_id = None
        bench.finish()
        bench.check_at_rest()
        assert [s.id for s in submissions if s.error] == [submissions[culprit].id]
        for submission in submissions:
            book = submission.account.sequences[submission.id]
            assert submission.error or (book.computed_first, book.recomputed) == (9, 0)


@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_fault_that_does_not_repeat(count: int) -> None:
    """No sequence fails, and at most two further passes are needed."""
    bench = EngineBench(LIMITS)
    submissions = admitted_together(bench, prompts_of(count))
    bench.dials.fail_steps = 1
    assert passes_of_the_search(bench) == min(count, 2)
    bench.finish()
    bench.check_at_rest()
    assert not any(submission.error for submission in submissions)
    assert all(submission.admissions == [0] for submission in submissions)


def test_nobody_else_runs_meanwhile() -> None:
    """A request that arrives during the search is admitted once the search is over."""
    bench = EngineBench(LIMITS, dials=Dials(poison_token_id=POISON))
    prompts = prompts_of(4)
    prompts[3].append(POISON)
    admitted_together(bench, prompts)
    fail_once(bench)
    (newcomer,) = bench.submit([50, 51], 2)
    while bench.is_searching:
        assert not any(newcomer.id in plan.row_ids for plan in bench.plans)
        bench.step()
    bench.finish()
    bench.check_at_rest()
    assert newcomer.reason == "length"


def test_reader_of_the_other_half_waits_for_it() -> None:
    """If a step that admitted two prompts with the same prefix fails, the second half is granted what the first has
    committed, never what is not written yet."""
    bench = EngineBench(LIMITS)
    prefix = list(range(60, 72))
    first, second = admitted_together(bench, [[*prefix, 1], [*prefix, 2]])
    bench.dials.fail_steps = 1
    bench.finish()
    bench.check_at_rest()
    assert (first.admissions, second.admissions) == ([0], [12])
    assert (first.written, second.written) == (12, 0)
    assert first.account.problems() == second.account.problems() == []


def test_group_without_room_runs_later() -> None:
    """A suspect that finds no free blocks does not hold up the others: it is served when there is room."""
    bench = EngineBench(attrs.evolve(LIMITS, num_blocks=8, enable_prefix_caching=False))
    first, second = admitted_together(bench, prompts_of(2, length=10))[:2]
    bench.dials.fail_steps = 1
    fail_once(bench)
    assert bench.plans[0].row_ids == [first.id]
    bench.reserve_blocks(3)  # as if others had taken them
    bench.step()
    assert not bench.is_searching
    assert second.admissions == []
    bench.reserve_blocks(0)
    bench.finish()
    bench.check_at_rest()
    assert first.reason == second.reason == "length"


def test_pass_that_raises_after_it_has_drawn() -> None:
    """Tokens drawn in a pass that raises are discarded, and not fed to the next pass: the output is that of a run
    alone."""
    bench = EngineBench(LIMITS)
    submissions = admitted_together(bench, prompts_of(3))
    backend = bench.executor.backend
    step, num_left = backend.step, [0, 1, 0, 0, 0, 1, 0, 0]

    def draw_and_raise(batch: StepBatch) -> Drawn:
        drawn = step(batch)
        if num_left and num_left.pop(0):
            raise RuntimeError("after everything was drawn")
        return drawn

    with mock.patch.object(backend, "step", draw_and_raise):
        bench.finish()
    bench.check_at_rest()
    assert not num_left
    assert [s.reason for s in submissions] == ["length"] * 3


@settings(max_examples=40)
@given(rows=st.dictionaries(st.integers(1, 20), st.integers(1, 50), min_size=1, max_size=9), memory=st.booleans())
def test_groups_of_a_failed_step(rows: dict[int, int], memory: bool) -> None:
    """Each row is in one group. Where memory ran out, each group has at most half of the positions; otherwise there are
    two of about the same number of rows."""
    retries, groups = Retries(), []
    retries.on_failed(rows, out_of_memory=memory)
    while retries.is_active:
        groups.append(dict(retries.group))
        retries.skip()
    assert [sequence_id for group in groups for sequence_id in group] == list(rows)
    if memory:
        assert all(sum(group.values()) <= max(1, sum(rows.values()) // 2) for group in groups)
    else:
        assert len(groups) == min(2, len(rows)) and max(map(len, groups)) - min(map(len, groups)) <= 1
        assert all(group[sequence_id] == rows[sequence_id] for group in groups for sequence_id in group)


# ---------------------------------------------------------------- out of memory


def test_out_of_memory_lowers_the_budget_for_a_minute() -> None:
    """A prompt whose step does not fit is computed in smaller chunks, and so are those after it; chunks are twice as
    large after a while, and as large as ever after a minute."""
    bench = EngineBench(LIMITS, dials=Dials(max_tokens_in_memory=30))
    (long,) = bench.submit(list(range(100, 190)), 4)
    bench.finish()
    assert bench.batcher.token_budget == 22  # 90, 45, and 22
    bench.dials.max_tokens_in_memory = None
    bench.submit(list(range(200, 290)), 4)
    assert num_positions(bench.plans[0]) == 22
    bench.finish()
    bench.now = 15.0
    bench.submit(list(range(400, 490)), 4)
    assert num_positions(bench.plans[0]) == 44
    bench.finish()
    bench.now = 60.0
    bench.submit(list(range(300, 390)), 4)
    assert num_positions(bench.plans[0]) == 90
    bench.finish()
    bench.check_at_rest()
    assert long.reason == "length"
    book = long.account.sequences[long.id]
    assert (book.computed_first, book.recomputed) == (90, 0)


def test_request_too_large_for_memory_fails_alone() -> None:
    """The client of a request that fits in no step is told to try again later; afterwards the token budget is half of
    the usual one, not that of the last attempt."""
    bench = EngineBench(LIMITS, dials=Dials(hungry_token_id=POISON))
    prompts = prompts_of(5)
    prompts[2].append(POISON)
    submissions = admitted_together(bench, prompts)
    bench.finish()
    bench.check_at_rest()
    assert [s.reason for s in submissions] == ["length", "length", None, "length", "length"]
    hungry = submissions[2]
    assert hungry.error is not None and "not enough memory" in hungry.error
    kinds = [kind for report in bench.reports for kind in report.terminal_error_kinds if kind is not None]
    assert kinds == [ErrorKind.OVERLOADED]
    assert bench.batcher.token_budget == LIMITS.max_num_batched_tokens // 2


def test_lowered_budget_starves_nobody() -> None:
    """If the budget is smaller than the number of decoding sequences, those that have waited longest come first."""
    bench = EngineBench(LIMITS, dials=Dials(max_tokens_in_memory=2))
    submissions = [bench.submit([30 + index], 20)[0] for index in range(5)]
    while not all(submission.tokens for submission in submissions) or bench.batcher.token_budget > 2:
        bench.step()
    before = [len(submission.tokens) for submission in submissions]
    for _ in range(15):
        bench.step()
    assert all(len(s.tokens) - num_tokens >= 4 for s, num_tokens in zip(submissions, before, strict=True))
    bench.finish()
    bench.check_at_rest()
    assert all(submission.reason == "length" for submission in submissions)
