"""The scheduler's decisions one at a time, on the whole engine without a loop."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed
from quipu.actors.scheduler import running
from quipu.actors.scheduler.config import SchedulerConfig
from quipu.kernels.fake import Dials
from tests.actors.engine_bench import EngineBench

PROMPT = list(range(100, 110))


def bench_of(*, dials: Dials | None = None, **changes: Any) -> EngineBench:
    """Blocks of 4 tokens, 30 of them, and room for everything unless said otherwise."""
    limits = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
    return EngineBench(attrs.evolve(limits, **changes), dials=dials)


def last_report(bench: EngineBench) -> StepReport:
    return bench.reports[-1]


def test_the_second_turn_reads_what_the_first_left() -> None:
    """Every full block whose positions were all computed: of a 16-token turn the last token never was."""
    bench = bench_of()
    (first,) = bench.submit(PROMPT, 6)
    bench.finish()
    (second,) = bench.submit([*PROMPT, *first.tokens, 1], 4)
    bench.finish()
    (third,) = bench.submit([*PROMPT, *first.tokens, 1, 2], 1)
    bench.finish()
    bench.check_at_rest()
    assert first.admissions == [0]
    assert second.admissions == [12]
    assert third.admissions == [16]


def test_steps_overlap() -> None:
    """While one step runs the next is planned: its decode row feeds a token that only the device knows."""
    bench = bench_of()
    bench.submit(PROMPT, 5)
    assert [plan.row_token_ids for plan in bench.plans] == [[PROMPT], [[]]]
    bench.finish()
    bench.check_at_rest()


def test_long_prompts_are_chunked_and_decodes_come_first() -> None:
    """A budget of 4 serves the running decode before the new prompt's chunks, which are no hits of their own."""
    bench = bench_of(max_num_batched_tokens=4, max_steps_in_flight=1)
    (short,) = bench.submit([1], 9)
    (long,) = bench.submit(PROMPT, 1)
    bench.step()
    assert list(bench.plans[0].row_ids) == [short.id, long.id]
    assert list(bench.plans[0].row_counts) == [1, 3]
    bench.finish()
    bench.check_at_rest()
    assert long.admissions == [0]
    assert long.written == 8


def test_equal_prompts_in_one_step_are_both_misses_with_one_owner() -> None:
    """Neither reads KV that is not written, and the write is counted once."""
    bench = bench_of()
    first, second = (bench.submit(PROMPT, 1, num_choices=1)[0] for _ in range(2))
    bench.finish()
    bench.check_at_rest()
    assert (first.admissions, second.admissions) == ([0], [8])  # the second came while the first was in flight

    bench = bench_of(max_steps_in_flight=1)
    bench.submit([1], 1)
    first, second = (bench.submit(PROMPT, 1)[0] for _ in range(2))
    bench.finish()
    bench.check_at_rest()
    assert (first.admissions, second.admissions) == ([0], [0])  # both waited for the same step
    assert (first.written, second.written) == (8, 0)


@pytest.mark.parametrize("kind", [StepDone, StepFailed, StepDropped])
def test_a_result_that_is_heard_twice_changes_nothing(kind: type) -> None:
    """No second booking, no second token, no second Terminal."""
    bench = bench_of(dials=Dials(fail_steps=0 if kind is StepDone else 1))
    bench.submit(PROMPT, 5)
    while not isinstance(result := bench.step(), kind):
        pass
    num_reports, num_plans = len(bench.reports), len(bench.plans)
    for _ in range(3):
        bench.hear_again(result)
    assert (len(bench.reports), len(bench.plans)) == (num_reports, num_plans)
    bench.finish()
    bench.check_at_rest()


def test_a_failed_step_fails_its_sequences_and_nobody_else() -> None:
    """Who waited, or was only in the dropped step behind it, finishes with the tokens it would have had."""
    bench = bench_of(max_num_batched_tokens=12)
    (poisoned,) = bench.submit([*PROMPT[:8], 7], 4)
    bench.dials.poison_token_id = 7
    (other,) = bench.submit(PROMPT, 4)
    (waiting,) = bench.submit([1, 2], 4)
    bench.finish()
    bench.check_at_rest()
    assert poisoned.error == "FakeFault: the batch holds the poisoned token"
    assert poisoned.tokens == []
    assert poisoned.cached is None
    assert other.reason == waiting.reason == "length"


def test_an_admission_in_a_dropped_step_is_withdrawn_uncounted() -> None:
    """It was granted what the failed step should have written: admitted again, as its first time, it reads nothing."""
    bench = bench_of(dials=Dials(fail_steps=1))
    bench.submit(PROMPT, 1)
    (follower,) = bench.submit(PROMPT, 2)
    assert bench.plans[1].admitted_keys[0], "the prefix was granted while its writer was in flight"
    assert isinstance(bench.step(), StepFailed)
    assert isinstance(bench.step(), StepDropped)
    assert bench.num_withdrawn == 1
    bench.finish()
    bench.check_at_rest()
    assert follower.admissions == [0]
    assert follower.cached == 0
    assert follower.written == 8


def test_a_preempted_sequence_resumes_where_it_was() -> None:
    """Its tokens are the same, its cached count is that of its first admission, what it covers again is recomputed."""
    bench = bench_of(num_blocks=6, enable_prefix_caching=False)
    first, second = bench.submit([1, 2, 3, 4], 12, num_choices=2)
    bench.finish()
    bench.check_at_rest()
    assert first.num_preempted == 0
    assert second.num_preempted > 0
    book = second.account.sequences[second.id]
    assert (book.computed_first, book.restored_first) == (4, 0)
    assert book.recomputed > 4


def test_a_late_row_of_a_preempted_sequence_is_booked_without_its_token() -> None:
    """It ran, so admission and span count; the token of the life before is void, and drawn again later."""
    bench = bench_of(block_size=1, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=False)
    first, second = bench.submit([1, 2], 3, num_choices=2)
    bench.submit([3], 1)
    while not second.num_preempted:
        bench.step()
    late = bench.plans[0]
    assert second.id in late.row_ids, "in flight when its blocks were taken"
    num_tokens = len(second.tokens)
    bench.step()
    report = last_report(bench)
    assert second.id in report.span_ids
    assert second.id not in report.token_sequence_ids
    assert len(second.tokens) == num_tokens
    bench.finish()
    bench.check_at_rest()
    assert first.reason == second.reason == "length"


def test_a_row_of_an_earlier_life_gives_no_token_to_the_present_one() -> None:
    """Preempted by step 2 and admitted again in step 3, all while step 1 runs: both admissions are booked, in order."""
    bench = bench_of(block_size=1, num_blocks=6, enable_prefix_caching=False, max_steps_in_flight=3)
    first, second = bench.submit([1, 2], 2, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id, second.id], [first.id], [second.id]]
    assert bench.plans[2].admitted_ids == [second.id]
    bench.step()
    assert (len(first.tokens), len(second.tokens)) == (1, 0)
    bench.finish()
    bench.check_at_rest()
    assert len(second.admissions) > 1
    assert first.reason == second.reason == "length"


def test_a_sequence_preempted_before_its_step_failed_does_not_fail_with_it() -> None:
    """It waits for another admission anyway, which is then its first."""
    bench = bench_of(block_size=1, num_blocks=6, enable_prefix_caching=False, dials=Dials(fail_steps=1))
    first, second = bench.submit([1, 2], 2, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id, second.id], [first.id]]
    assert second.num_preempted == 1
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]


def test_a_running_sequence_loses_only_the_dropped_positions() -> None:
    """It was given nothing in the failing step, and was in the next: it goes on from before that one, admitted once."""
    bench = bench_of(block_size=1, enable_prefix_caching=False)
    first, second = bench.submit([1, 2], 6, num_choices=2)
    bench.denied = {second.id}
    while set(bench.plans[0].row_ids) != {first.id}:
        bench.step()
    assert second.id in bench.plans[1].row_ids
    bench.dials.fail_steps = 1
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]
    assert second.account.sequences[second.id].recomputed == 0


def test_the_withdrawn_wait_again_in_their_order() -> None:
    """Two admitted by two dropped steps: the one that came first is admitted first again."""
    bench = bench_of(max_num_batched_tokens=6, max_steps_in_flight=3, dials=Dials(fail_steps=1))
    _failing, first, second = (bench.submit([n] * 5, 1)[0] for n in (1, 2, 3))
    assert [plan.admitted_ids for plan in bench.plans] == [[1], [2], [3]]
    for _ in range(3):
        bench.step()
    assert bench.plans[0].admitted_ids == [first.id, second.id]
    bench.finish()
    bench.check_at_rest()


def test_the_preempted_wait_before_newcomers() -> None:
    """Nobody who has not been served yet overtakes."""
    bench = bench_of(num_blocks=6, max_num_seqs=2, enable_prefix_caching=False)
    _first, second = bench.submit([1, 2, 3, 4], 12, num_choices=2)
    (newcomer,) = bench.submit([9], 1)
    while not second.num_preempted:
        bench.step()
    while len(second.admissions) < 2:
        assert newcomer.admissions == []
        bench.step()
    bench.finish()
    bench.check_at_rest()


def test_an_admission_that_was_preempted_and_then_dropped_is_not_counted() -> None:
    """Admitted in step 2, preempted by step 3, both dropped with step 1: the next admission is its first."""
    bench = bench_of(
        block_size=1,
        num_blocks=6,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        enable_prefix_caching=False,
        max_steps_in_flight=3,
        dials=Dials(fail_steps=1),
    )
    first, second = bench.submit([1, 2], 3, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id], [first.id, second.id], [first.id]]
    assert second.num_preempted == 1
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]


def test_an_end_token_ends_and_the_row_behind_it_is_booked_before_the_terminal() -> None:
    """The step after the last token was in flight already: its span counts, its token does not."""
    bench = bench_of(dials=Dials(eos_after=1, eos_token_id=5), eos_token_ids=frozenset([5]))
    (life,) = bench.submit(PROMPT, 9)
    bench.step()
    bench.step()
    assert life.reason == "stop"
    assert not life.terminal
    bench.step()
    assert life.terminal
    report = last_report(bench)
    assert (report.span_ids, report.token_ids, report.terminal_ids) == ([life.id], [], [life.id])
    bench.check_at_rest()
    assert len(life.tokens) == 2


def test_stop_tokens_and_ignored_ends() -> None:
    """A stop id of the request ends it, also where `ignore_eos` makes of the model's end one token among others."""
    bench = bench_of(dials=Dials(eos_after=1, eos_token_id=5), eos_token_ids=frozenset([5]))
    (ended,) = bench.submit(PROMPT, 4)
    (ignoring,) = bench.submit(PROMPT, 4, ignore_eos=True)
    (stopped,) = bench.submit(PROMPT, 4, ignore_eos=True, stop_token_ids=(5,))
    bench.finish()
    bench.check_at_rest()
    assert (len(ended.tokens), ended.reason) == (2, "stop")
    assert (len(ignoring.tokens), ignoring.reason) == (4, "length")
    assert (len(stopped.tokens), stopped.reason) == (2, "stop")


def test_an_abort_in_the_queue_ends_at_once_with_nothing_booked() -> None:
    """Cached stays unknown, which is not 0."""
    bench = bench_of(max_num_seqs=1)
    bench.submit(PROMPT, 4)
    (waiting,) = bench.submit(PROMPT, 4)
    bench.abort(waiting)
    assert waiting.terminal
    assert last_report(bench).terminal_ids == [waiting.id]
    assert waiting.cached is None
    bench.finish()
    bench.check_at_rest()


def test_an_abort_in_flight_ends_after_the_last_step_that_holds_it() -> None:
    """Both steps in flight are booked first; its blocks are free at once, its prefix stays to be hit."""
    bench = bench_of()
    (life,) = bench.submit(PROMPT, 9)
    bench.abort(life)
    assert bench.manager.allocations == {}
    bench.step()
    assert not life.terminal
    bench.step()
    assert life.terminal
    assert life.tokens == []
    book = life.account.sequences[life.id]
    assert (book.computed_first, life.written) == (10, 8)
    (again,) = bench.submit(PROMPT, 1)
    bench.finish()
    bench.check_at_rest()
    assert again.admissions == [8]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "why"),
    [
        ([], 1, "The prompt must not be empty."),
        (PROMPT, 91, "The prompt and `max_tokens` add up to 101 tokens, which exceeds the context length of 100."),
        (PROMPT, 71, "The prompt and `max_tokens` add up to 81 tokens, which exceeds the KV cache capacity of 80."),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], max_tokens: int, why: str) -> None:
    """With a Terminal that says why and that it is the request's fault."""
    bench = bench_of(num_blocks=21)
    (life,) = bench.submit(prompt, max_tokens)
    assert life.error == why
    assert last_report(bench).terminal_error_kinds == ["invalid"]
    assert bench.plans == bench.results
    bench.check_at_rest()


def test_what_just_fits_runs_alone() -> None:
    """A sequence may need every block of the cache."""
    bench = bench_of(num_blocks=21)
    (life,) = bench.submit(PROMPT, 70)
    bench.finish()
    bench.check_at_rest()
    assert len(life.tokens) == 70


@pytest.mark.parametrize(("most", "together"), [(100, 3), (4, 2), (3, 1), (1, 1)])
def test_long_prompts_are_looked_up_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, most: int, together: int) -> None:
    """What the block manager looks up in one step is bounded; the first that waits is always among it, and all come."""
    monkeypatch.setattr(running, "MAX_CANDIDATE_KEYS", most)
    bench = bench_of(max_steps_in_flight=1)
    bench.submit([1], 1)
    waiting = [bench.submit(PROMPT[:9], 1)[0] for _ in range(3)]  # two full blocks each
    bench.step()
    assert list(bench.plans[-1].row_ids) == [each.id for each in waiting[:together]]
    bench.finish()
    bench.check_at_rest()
    assert all(len(each.tokens) == 1 for each in waiting)
