"""The second entry of the books: what the executor confirms rests on its own record, not on what it is told."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from msgspec.structs import replace

from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed
from quipu.actors.scheduler.config import SchedulerConfig
from quipu.kernels.fake import continuation
from tests.actors.engine_bench import EngineBench
from tests.runtimes import num_passes

PROMPT = list(range(100, 110))


def warm_bench(**changes: Any) -> EngineBench:
    """Two full blocks of 4 tokens of PROMPT are cached."""
    limits = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    bench = EngineBench(attrs.evolve(limits, **changes))
    bench.submit(PROMPT, 1)
    bench.finish()
    return bench


def hit(bench: EngineBench) -> StepPlan:
    """The plan of a prompt that is granted both blocks."""
    bench.submit([*PROMPT, 1], 1)
    (plan,) = bench.plans
    assert len(plan.admitted_keys[0]) == 2
    return plan


def read_of(bench: EngineBench, plan: StepPlan) -> int:
    result = bench.executor.run(plan)
    assert isinstance(result, StepDone)
    return result.read_tokens[0]


def test_a_right_grant_is_confirmed() -> None:
    """Both blocks hold what the grant says."""
    bench = warm_bench()
    assert read_of(bench, hit(bench)) == 8


def test_swapped_blocks_are_not_confirmed() -> None:
    """Right blocks in the wrong order hold nothing of what is claimed."""
    bench = warm_bench()
    plan = hit(bench)
    first, second, *rest = plan.row_new_blocks[0]
    assert read_of(bench, replace(plan, row_new_blocks=[[second, first, *rest]])) == 0


def test_a_block_that_was_never_written_is_not_confirmed() -> None:
    """What stands before it still counts."""
    bench = warm_bench()
    plan = hit(bench)
    first, _second, *rest = plan.row_new_blocks[0]
    assert (
        read_of(
            bench,
            replace(plan, row_new_blocks=[[first, 25, *rest], *plan.row_new_blocks[1:]], row_samples=[False]),
        )
        == 4
    )


def test_a_partial_block_is_not_confirmed() -> None:
    """Of ten tokens the last two stand in a block that is not full, whatever key somebody gives it."""
    bench = warm_bench()
    plan = hit(bench)
    partial = 3  # the third block of the first table
    blocks = [*plan.row_new_blocks[0][:1], partial, *plan.row_new_blocks[0][2:]]
    assert read_of(bench, replace(plan, row_new_blocks=[blocks], row_samples=[False])) == 4


def test_a_block_that_was_overwritten_is_not_confirmed() -> None:
    """A stale grant: the key was right once."""
    bench = warm_bench(num_blocks=6)
    stale = hit(bench)
    bench.plans.clear()
    writer = replace(
        stale,
        admitted_ids=[77],
        admitted_keys=[[]],
        admitted_tokens=[[]],
        row_ids=[77],
        row_starts=[0],
        row_counts=[11],
        row_token_ids=[[5] * 11],
    )
    assert isinstance(bench.executor.run(writer), StepDone)
    assert read_of(bench, stale) == 0


@pytest.mark.parametrize("partly", [True, False])
def test_a_failed_pass_leaves_no_record_of_what_it_was_to_write(partly: bool) -> None:
    """Whether it had written some of it or none."""
    bench = warm_bench()
    plan = hit(bench)
    bench.dials.fail_steps = int(partly)
    bench.dials.poison_token_id = None if partly else 5
    writer = replace(
        plan,
        admitted_ids=[77],
        admitted_keys=[[]],
        admitted_tokens=[[]],
        row_ids=[77],
        row_starts=[0],
        row_counts=[11],
        row_token_ids=[[5] * 11],
    )
    assert isinstance(bench.executor.run(writer), StepFailed)
    assert read_of(bench, replace(plan, generation=1)) == 0


def test_plans_of_a_failed_generation_are_dropped_until_it_is_raised() -> None:
    """Dropped without a pass; the next generation runs."""
    bench = warm_bench()
    plan = hit(bench)
    bench.dials.fail_steps = 1
    assert isinstance(bench.executor.run(plan), StepFailed)
    before = num_passes(bench.executor)
    assert bench.executor.run(plan) == StepDropped(plan.step, 0)
    assert num_passes(bench.executor) == before
    assert isinstance(bench.executor.run(replace(plan, generation=1)), StepDone)


def test_a_dropped_plan_still_releases() -> None:
    """Slots of sequences that ended are free again, though the plan that said so was not run."""
    bench = warm_bench(max_num_seqs=1)
    plan = hit(bench)
    assert plan.released_ids
    executor = bench.executor
    bench.dials.fail_steps = 1
    poison = replace(plan, released_ids=[], admitted_ids=[], admitted_keys=[], row_ids=[1], row_counts=[1])
    assert isinstance(
        executor.run(replace(poison, row_starts=[10], row_new_blocks=[[]], row_token_ids=[[1]])),
        StepFailed,
    )
    assert isinstance(executor.run(plan), StepDropped)
    assert isinstance(executor.run(replace(plan, generation=1, released_ids=[])), StepDone)


def lent(bench: EngineBench) -> StepPlan:
    """The plan of a prompt that ends with the second of the blocks: it is granted one, and the other is lent."""
    bench.submit(PROMPT[:8], 1)
    (plan,) = bench.plans
    assert len(plan.admitted_keys[0]) == 1
    assert plan.admitted_copy_sources[0] > 0
    return plan


def done(bench: EngineBench, plan: StepPlan) -> StepDone:
    result = bench.executor.run(plan)
    assert isinstance(result, StepDone)
    return result


def test_a_lent_block_is_copied() -> None:
    """Of its four tokens one is computed: the draw comes from it, and is what a cold run draws."""
    bench = warm_bench()
    result = done(bench, lent(bench))
    assert (result.read_tokens, result.copied_tokens) == ([4], [3])
    assert (result.row_starts, result.row_ends) == ([7], [8])
    assert result.sampled_token_ids == continuation(PROMPT[:8], 1)


@pytest.mark.parametrize("block", [1, 3, 25], ids=["another key", "not full", "never written"])
def test_a_wrong_loan_is_computed(block: int) -> None:
    """A block that does not hold what the prompt goes on with is not copied, and nothing is claimed."""
    bench = warm_bench()
    result = done(bench, replace(lent(bench), admitted_copy_sources=[block]))
    assert (result.read_tokens, result.copied_tokens) == ([4], [])
    assert (result.row_starts, result.row_ends) == ([4], [8])
    assert result.sampled_token_ids == continuation(PROMPT[:8], 1)


def test_nothing_is_copied_behind_a_grant_that_is_not_confirmed() -> None:
    """What the loan would follow is not there: everything after the grant is computed."""
    bench = warm_bench()
    plan = lent(bench)
    _granted, *rest = plan.row_new_blocks[0]
    result = done(bench, replace(plan, row_new_blocks=[[25, *rest]], row_samples=[False]))
    assert (result.read_tokens, result.copied_tokens) == ([0], [])
    assert (result.row_starts, result.row_ends) == ([4], [8])


def test_the_lent_block_may_be_the_one_that_is_written() -> None:
    """Nobody holds it: where the pool is short it becomes the newcomer's own, and has what it needs in it already."""
    bench = warm_bench(num_blocks=4)
    bench.submit([1, 2], 2)
    (life,) = bench.submit(PROMPT[:8], 1)
    bench.step()
    plan = bench.plans[-1]
    _granted, own = plan.row_new_blocks[plan.row_ids.index(life.id)]
    assert plan.admitted_copy_sources == [own]
    bench.finish()
    bench.check_at_rest()
    assert bench.num_copied == 1
