"""The executor's record: it confirms a grant by its own tags, not by what the plan claims."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from msgspec.structs import replace

from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepDone, StepDropped, StepFailed
from tests.actors.engine.engine_bench import EngineBench
from tests.fake_oracle import continuation
from tests.runtimes import num_passes

PROMPT = list(range(100, 110))


def warm_bench(**changes: Any) -> EngineBench:
    """Make a bench in which two full blocks of 4 tokens of PROMPT are cached."""
    limits = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    bench = EngineBench(attrs.evolve(limits, **changes))
    bench.submit(PROMPT, 1)
    bench.finish()
    return bench


def hit(bench: EngineBench) -> StepPlan:
    """Return the plan of a prompt that is granted both blocks."""
    bench.submit([*PROMPT, 1], 1)
    (plan,) = bench.plans
    assert len(plan.admitted[0].keys) == 2
    return plan


def without_draw(plan: StepPlan) -> StepPlan:
    """Return the plan for a sequence that draws no token, which would depend on wrong blocks."""
    (admit,) = plan.admitted
    return replace(plan, admitted=[replace(admit, max_len=len(admit.tokens))])


def writer_of(plan: StepPlan) -> StepPlan:
    """Return a plan in which another sequence, to which nothing is granted, writes the same blocks."""
    (admit,), (blocks,) = plan.admitted, plan.new_blocks.values()
    writer = replace(admit, sequence_id=77, keys=[], tokens=[5] * 11, max_len=12)
    return replace(plan, admitted=[writer], row_ids=[77], chunk_starts=[0], chunk_counts=[11], new_blocks={77: blocks})


def read_of(bench: EngineBench, plan: StepPlan) -> int:
    result = bench.executor.run(plan)
    assert isinstance(result, StepDone)
    return result.read_tokens[0]


def test_correct_grant_is_confirmed() -> None:
    """Both blocks contain what the grant says."""
    bench = warm_bench()
    assert read_of(bench, hit(bench)) == 8


def test_swapped_blocks_are_not_confirmed() -> None:
    """The right blocks in the wrong order do not confirm any of the grant."""
    bench = warm_bench()
    plan = hit(bench)
    ((sequence_id, (first, second, *rest)),) = plan.new_blocks.items()
    assert read_of(bench, replace(plan, new_blocks={sequence_id: [second, first, *rest]})) == 0


def test_unwritten_block_is_not_confirmed() -> None:
    """The blocks before it still count."""
    bench = warm_bench()
    plan = hit(bench)
    ((sequence_id, (first, _second, *rest)),) = plan.new_blocks.items()
    assert read_of(bench, replace(without_draw(plan), new_blocks={sequence_id: [first, 25, *rest]})) == 4


def test_partial_block_is_not_confirmed() -> None:
    """The last two of ten tokens are in a block that is not full, whatever key is claimed for it."""
    bench = warm_bench()
    plan = hit(bench)
    partial = 3  # the third block of the first table
    ((sequence_id, (first, _second, *rest)),) = plan.new_blocks.items()
    assert read_of(bench, replace(without_draw(plan), new_blocks={sequence_id: [first, partial, *rest]})) == 4


def test_overwritten_block_is_not_confirmed() -> None:
    """The grant is stale: its key was once correct."""
    bench = warm_bench(num_blocks=6)
    stale = hit(bench)
    bench.plans.clear()
    assert isinstance(bench.executor.run(writer_of(stale)), StepDone)
    assert read_of(bench, stale) == 0


@pytest.mark.parametrize("partly", [True, False])
def test_failed_pass_leaves_no_tags(partly: bool) -> None:
    """Blocks of a failed pass have no tags, whether or not it had written some of them."""
    bench = warm_bench()
    plan = hit(bench)
    bench.dials.fail_steps = int(partly)
    bench.dials.poison_token_id = None if partly else 5
    assert isinstance(bench.executor.run(writer_of(plan)), StepFailed)
    assert read_of(bench, replace(plan, generation=1)) == 0


def test_plans_of_failed_generation_are_dropped() -> None:
    """Plans of a failed generation are dropped without a pass; the next generation runs."""
    bench = warm_bench()
    plan = hit(bench)
    bench.dials.fail_steps = 1
    assert isinstance(bench.executor.run(plan), StepFailed)
    before = num_passes(bench.executor)
    assert bench.executor.run(plan) == StepDropped(plan.step, 0)
    assert num_passes(bench.executor) == before
    assert isinstance(bench.executor.run(replace(plan, generation=1)), StepDone)


def test_dropped_plan_still_releases_slots() -> None:
    """Slots of ended sequences are free again although the plan that released them was not run."""
    bench = warm_bench(max_num_seqs=1)
    plan = hit(bench)
    assert plan.released_ids
    executor = bench.executor
    bench.dials.fail_steps = 1
    failing = replace(plan, released_ids=[], admitted=[], row_ids=[1], num_going_on=1, new_blocks={})
    assert isinstance(executor.run(replace(failing, chunk_starts=[], chunk_counts=[])), StepFailed)
    assert isinstance(executor.run(plan), StepDropped)
    assert isinstance(executor.run(replace(plan, generation=1, released_ids=[])), StepDone)


def copyable(bench: EngineBench) -> StepPlan:
    """Return the plan of a prompt that ends with the second block: it is granted one and offered the other for
    copying."""
    bench.submit(PROMPT[:8], 1)
    (plan,) = bench.plans
    assert len(plan.admitted[0].keys) == 1
    assert plan.admitted[0].copy_source > 0
    return plan


def done(bench: EngineBench, plan: StepPlan) -> StepDone:
    result = bench.executor.run(plan)
    assert isinstance(result, StepDone)
    return result


def test_last_block_is_copied() -> None:
    """Only one of its four tokens is computed, and the sampled token is that of a cold run."""
    bench = warm_bench()
    result = done(bench, copyable(bench))
    assert (result.read_tokens, result.copied_tokens) == ([4], [3])
    assert (result.row_starts, result.row_ends) == ([7], [8])
    assert result.token_ids == continuation(PROMPT[:8], 1)


@pytest.mark.parametrize("block", [1, 3, 25], ids=["another key", "not full", "never written"])
def test_wrong_copy_source_is_ignored(block: int) -> None:
    """A block that does not contain the rest of the prompt is not copied, and nothing is claimed."""
    bench = warm_bench()
    plan = copyable(bench)
    result = done(bench, replace(plan, admitted=[replace(plan.admitted[0], copy_source=block)]))
    assert (result.read_tokens, result.copied_tokens) == ([4], [])
    assert (result.row_starts, result.row_ends) == ([4], [8])
    assert result.token_ids == continuation(PROMPT[:8], 1)


def test_no_copy_after_unconfirmed_grant() -> None:
    """The blocks that the copy would follow are missing, so everything after the confirmed grant is computed."""
    bench = warm_bench()
    plan = copyable(bench)
    ((sequence_id, (_granted, *rest)),) = plan.new_blocks.items()
    result = done(bench, replace(without_draw(plan), new_blocks={sequence_id: [25, *rest]}))
    assert (result.read_tokens, result.copied_tokens) == ([0], [])
    assert (result.row_starts, result.row_ends) == ([4], [8])


def test_copy_source_may_be_the_destination() -> None:
    """No sequence holds the source: in a small pool it becomes the new sequence's own block, which then already has the
    right contents."""
    bench = warm_bench(num_blocks=4)
    bench.submit([1, 2], 2)
    (submission,) = bench.submit(PROMPT[:8], 1)
    bench.step()
    plan = bench.plans[-1]
    _granted, own = plan.new_blocks[submission.id]
    assert [admit.copy_source for admit in plan.admitted] == [own]
    bench.finish()
    bench.check_at_rest()
    assert bench.num_copied == 1
