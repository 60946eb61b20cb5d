"""The scheduler's decisions one at a time, on the whole engine without an event loop."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.engine.scheduler import running
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.mover import Lend
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed
from quipu.kernels.fake import Dials
from tests.actors.engine.block_manager.proposals import keys_of
from tests.actors.engine.engine_bench import EngineBench

PROMPT = list(range(100, 110))


def bench_of(*, dials: Dials | None = None, **changes: Any) -> EngineBench:
    """Make a bench with 30 usable blocks of 4 tokens and room for everything, unless `changes` say otherwise."""
    limits = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
    return EngineBench(attrs.evolve(limits, **changes), dials=dials)


def last_report(bench: EngineBench) -> StepReport:
    return bench.reports[-1]


def test_next_turn_hits_blocks_of_previous_turn() -> None:
    """A turn hits every full block whose positions were all computed; the last sampled token never is."""
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
    """The next step is planned while one runs: its decoding row feeds a token that only the device knows."""
    bench = bench_of()
    bench.submit(PROMPT, 5)
    assert [(plan.chunk_counts, plan.num_going_on) for plan in bench.plans] == [([len(PROMPT)], 0), ([], 1)]
    bench.finish()
    bench.check_at_rest()


def test_decodes_precede_prefill_chunks() -> None:
    """A budget of 4 serves the running decode before the new prompt's chunks, which do not count as hits."""
    bench = bench_of(max_num_batched_tokens=4, max_steps_in_flight=1)
    (short,) = bench.submit([1], 9)
    (long,) = bench.submit(PROMPT, 1)
    bench.step()
    assert list(bench.plans[0].row_ids) == [short.id, long.id]
    assert (bench.plans[0].num_going_on, bench.plans[0].chunk_counts) == (1, [3])
    bench.finish()
    bench.check_at_rest()
    assert long.admissions == [0]
    assert long.written == 8


def test_equal_prompts_in_one_step_both_miss() -> None:
    """Neither reads KV that is not written yet, and the write is counted once."""
    bench = bench_of()
    first, second = (bench.submit(PROMPT, 1, num_choices=1)[0] for _ in range(2))
    bench.finish()
    bench.check_at_rest()
    assert (first.admissions, second.admissions) == ([0], [8])  # the second one arrived while the first was in flight

    bench = bench_of(max_steps_in_flight=1)
    bench.submit([1], 1)
    first, second = (bench.submit(PROMPT, 1)[0] for _ in range(2))
    bench.finish()
    bench.check_at_rest()
    assert (first.admissions, second.admissions) == ([0], [0])  # both waited for the same step
    assert (first.written, second.written) == (8, 0)


@pytest.mark.parametrize("kind", [StepDone, StepFailed, StepDropped])
def test_duplicate_result_is_ignored(kind: type) -> None:
    """A duplicate result leads to no second booking, token or Terminal."""
    bench = bench_of(dials=Dials(fail_steps=0 if kind is StepDone else 1))
    bench.submit(PROMPT, 5)
    while not isinstance(result := bench.step(), kind):
        pass
    num_reports, num_plans = len(bench.reports), len(bench.plans)
    for _ in range(3):
        bench.handle_again(result)
    assert (len(bench.reports), len(bench.plans)) == (num_reports, num_plans)
    bench.finish()
    bench.check_at_rest()


def test_failed_step_fails_only_its_sequences() -> None:
    """Sequences that waited, or were only in the dropped step after it, finish with their usual tokens."""
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


def test_admission_in_dropped_step_is_not_counted() -> None:
    """The sequence was granted what the failed step should have written. Its next admission counts as the first and
    hits nothing."""
    bench = bench_of(dials=Dials(fail_steps=2))
    (writer,) = bench.submit(PROMPT, 1)
    (follower,) = bench.submit(PROMPT, 2)
    assert bench.plans[1].admitted[0].keys, "the prefix was granted while its writer was in flight"
    assert isinstance(bench.step(), StepFailed)
    assert isinstance(bench.step(), StepDropped)
    assert bench.num_withdrawn == 1
    bench.finish()
    bench.check_at_rest()
    assert writer.error, "its step was run again, and raised again"
    assert follower.admissions == [0]
    assert follower.cached == 0
    assert follower.written == 8


def test_preempted_sequence_resumes() -> None:
    """Its tokens stay the same, its cached count is that of its first admission, and what is computed again counts as
    recomputed."""
    bench = bench_of(num_blocks=6, enable_prefix_caching=False)
    first, second = bench.submit([1, 2, 3, 4], 12, num_choices=2)
    bench.finish()
    bench.check_at_rest()
    assert first.num_preempted == 0
    assert second.num_preempted > 0
    book = second.account.sequences[second.id]
    assert (book.computed_first, book.restored_first) == (4, 0)
    assert book.recomputed > 4


def test_blocks_that_were_lent_since_the_last_step() -> None:
    """If fewer blocks are free than the scheduler knew of, the sequence of worst rank loses its own all the same, and
    none is admitted before those that run have theirs."""
    bench = bench_of(num_blocks=4, max_steps_in_flight=1)
    bench.submit([1, 2, 3, 4], 1)
    bench.finish()
    first = bench.submit([5, 6, 7], 4)[0]
    second = bench.submit([8, 9], 5, domain="b")[0]
    bench.step()
    lent = bench.manager.lending.lend(Lend(1, keys_of("a", [1, 2, 3, 4], 4), waits=False))
    assert lent is not None and len(lent.blocks) == 1 and bench.manager.pool.num_free == 0
    while not first.terminal:
        bench.step()
    assert (first.num_preempted, second.num_preempted) == (0, 1)
    bench.manager.lending.end(1)
    bench.finish()
    bench.check_at_rest()


def test_late_row_of_preempted_sequence_loses_its_token() -> None:
    """The row ran, so its admission and span are booked; its token belongs to a void epoch and is sampled again
    later."""
    bench = bench_of(block_size=1, num_blocks=6, max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=False)
    first, second = bench.submit([1, 2], 3, num_choices=2)
    bench.submit([3], 1)
    while not second.num_preempted:
        bench.step()
    late = bench.plans[0]
    assert second.id in late.row_ids, "the row was in flight when its sequence lost its blocks"
    num_tokens = len(second.tokens)
    bench.step()
    report = last_report(bench)
    assert second.id in report.span_ids
    assert second.id not in report.token_sequence_ids
    assert len(second.tokens) == num_tokens
    bench.finish()
    bench.check_at_rest()
    assert first.reason == second.reason == "length"


def test_row_of_earlier_epoch_emits_no_token() -> None:
    """A sequence preempted by step 2 and admitted again in step 3, while step 1 runs, has both admissions booked, in
    order."""
    bench = bench_of(block_size=1, num_blocks=6, enable_prefix_caching=False, max_steps_in_flight=3)
    first, second = bench.submit([1, 2], 2, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id, second.id], [first.id], [second.id]]
    assert [admit.sequence_id for admit in bench.plans[2].admitted] == [second.id]
    bench.step()
    assert (len(first.tokens), len(second.tokens)) == (1, 0)
    bench.finish()
    bench.check_at_rest()
    assert len(second.admissions) > 1
    assert first.reason == second.reason == "length"


def test_preempted_sequence_survives_failure_of_its_step() -> None:
    """The preempted sequence is admitted again in any case, and that counts as its first admission."""
    bench = bench_of(block_size=1, num_blocks=6, enable_prefix_caching=False, dials=Dials(fail_steps=2))
    first, second = bench.submit([1, 2], 2, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id, second.id], [first.id]]
    assert second.num_preempted == 1
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]


def test_running_sequence_loses_only_dropped_positions() -> None:
    """A sequence that was only in the dropped step continues from before that step, without a second admission."""
    bench = bench_of(block_size=1, enable_prefix_caching=False)
    first, second = bench.submit([1, 2], 6, num_choices=2)
    bench.denied = {second.id}
    while set(bench.plans[0].row_ids) != {first.id}:
        bench.step()
    assert second.id in bench.plans[1].row_ids
    bench.dials.fail_steps = 2
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]
    assert second.account.sequences[second.id].recomputed == 0


def test_requeued_sequences_keep_their_order() -> None:
    """Of two sequences admitted by dropped steps, the one that arrived first is admitted first again."""
    bench = bench_of(max_num_batched_tokens=6, max_steps_in_flight=3, dials=Dials(fail_steps=2))
    _failing, first, second = (bench.submit([n] * 5, 1)[0] for n in (1, 2, 3))
    assert [[admit.sequence_id for admit in plan.admitted] for plan in bench.plans] == [[1], [2], [3]]
    for _ in range(4):
        bench.step()
    assert [admit.sequence_id for admit in bench.plans[0].admitted] == [first.id, second.id]
    bench.finish()
    bench.check_at_rest()


def test_preempted_sequences_precede_newcomers() -> None:
    """A sequence that has not been served yet does not overtake a preempted one."""
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


def test_preempted_and_dropped_admission_is_not_counted() -> None:
    """For a sequence admitted in step 2, preempted by step 3, and both dropped with step 1, the next admission is the
    first."""
    bench = bench_of(
        block_size=1,
        num_blocks=6,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        enable_prefix_caching=False,
        max_steps_in_flight=3,
        dials=Dials(fail_steps=2),
    )
    first, second = bench.submit([1, 2], 3, num_choices=2)
    assert [list(plan.row_ids) for plan in bench.plans] == [[first.id], [first.id, second.id], [first.id]]
    assert second.num_preempted == 1
    bench.finish()
    bench.check_at_rest()
    assert first.error
    assert second.reason == "length"
    assert second.admissions == [0]


def test_rows_past_eos_are_booked_before_terminal() -> None:
    """The step after the last token was already in flight: its span counts, its token does not."""
    bench = bench_of(dials=Dials(eos_after=1, eos_token_id=5), eos_token_ids=frozenset([5]))
    (submission,) = bench.submit(PROMPT, 9)
    bench.step()
    bench.step()
    assert submission.reason == "stop"
    assert not submission.terminal
    bench.step()
    assert submission.terminal
    report = last_report(bench)
    assert (report.span_ids, report.token_ids, report.terminal_ids) == ([submission.id], [], [submission.id])
    bench.check_at_rest()
    assert len(submission.tokens) == 2


def test_stop_tokens_and_ignore_eos() -> None:
    """A stop token of the request ends it, even if `ignore_eos` makes the model's end token an ordinary one."""
    bench = bench_of(dials=Dials(eos_after=1, eos_token_id=5), eos_token_ids=frozenset([5]))
    (ended,) = bench.submit(PROMPT, 4)
    (ignoring,) = bench.submit(PROMPT, 4, ignore_eos=True)
    (stopped,) = bench.submit(PROMPT, 4, ignore_eos=True, stop_token_ids=(5,))
    bench.finish()
    bench.check_at_rest()
    assert (len(ended.tokens), ended.reason) == (2, "stop")
    assert (len(ignoring.tokens), ignoring.reason) == (4, "length")
    assert (len(stopped.tokens), stopped.reason) == (2, "stop")


def test_abort_of_waiting_sequence() -> None:
    """The sequence ends at once with nothing booked; its cached count stays unknown, which is not 0."""
    bench = bench_of(max_num_seqs=1)
    bench.submit(PROMPT, 4)
    (waiting,) = bench.submit(PROMPT, 4)
    bench.abort(waiting)
    assert waiting.terminal
    assert last_report(bench).terminal_ids == [waiting.id]
    assert waiting.cached is None
    bench.finish()
    bench.check_at_rest()


def test_abort_of_running_sequence() -> None:
    """Both steps in flight are booked first. Its blocks are free at once, and its prefix can still be hit."""
    bench = bench_of()
    (submission,) = bench.submit(PROMPT, 9)
    bench.abort(submission)
    assert bench.manager.allocations == {}
    bench.step()
    assert not submission.terminal
    bench.step()
    assert submission.terminal
    assert submission.tokens == []
    book = submission.account.sequences[submission.id]
    assert (book.computed_first, submission.written) == (10, 8)
    (again,) = bench.submit(PROMPT, 1)
    bench.finish()
    bench.check_at_rest()
    assert again.admissions == [8]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        ([], 1, "The prompt must not be empty."),
        (PROMPT, 91, "The prompt and `max_tokens` add up to 101 tokens, which exceeds the context length of 100."),
        (PROMPT, 71, "The prompt and `max_tokens` add up to 81 tokens, which exceeds the KV cache capacity of 80."),
    ],
)
def test_sequence_that_can_never_run_is_refused(prompt: list[int], max_tokens: int, reason: str) -> None:
    """The Terminal of a refused sequence has the reason and says that the request is invalid."""
    bench = bench_of(num_blocks=21)
    (submission,) = bench.submit(prompt, max_tokens)
    assert submission.error == reason
    assert last_report(bench).terminal_error_kinds == ["invalid"]
    assert bench.plans == bench.results
    bench.check_at_rest()


def test_sequence_may_use_every_block() -> None:
    """A sequence may need every block of the cache."""
    bench = bench_of(num_blocks=21)
    (submission,) = bench.submit(PROMPT, 70)
    bench.finish()
    bench.check_at_rest()
    assert len(submission.tokens) == 70


@pytest.mark.parametrize(("limit", "num_together"), [(100, 3), (4, 2), (3, 1), (1, 1)])
def test_candidate_keys_per_step_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: int, num_together: int) -> None:
    """The keys looked up in one step are bounded; the first waiting sequence is always included, and all are admitted
    in the end."""
    monkeypatch.setattr(running, "MAX_CANDIDATE_KEYS", limit)
    bench = bench_of(max_steps_in_flight=1)
    bench.submit([1], 1)
    waiting = [bench.submit(PROMPT[:9], 1)[0] for _ in range(3)]  # two full blocks each
    bench.step()
    assert list(bench.plans[-1].row_ids) == [each.id for each in waiting[:num_together]]
    bench.finish()
    bench.check_at_rest()
    assert all(len(each.tokens) == 1 for each in waiting)
