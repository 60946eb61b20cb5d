"""An engine that has lost its connection: it drops its sequences in whatever state, and keeps what is committed.

`EngineBench.rejoin` checks what must hold at once; `test_planning_property.py` does it anywhere.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.sequence import Status
from quipu.actors.messages.prompts import Breakpoint, CacheTtl
from quipu.actors.messages.scheduler import StepDone
from tests.actors.engine.engine_bench import EngineBench

PROMPT = [(5 * at) % 31 + 1 for at in range(24)]
OTHER = [(3 * at) % 29 + 1 for at in range(24)]


def bench_of(**changes: Any) -> EngineBench:
    limits = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100)
    return EngineBench(attrs.evolve(limits, **changes))


def test_running_waiting_and_preempted() -> None:
    """All sequences are dropped, even choices that share blocks; the same prompt then finds its committed blocks."""
    bench = bench_of(num_blocks=18, max_num_seqs=4)
    for _ in range(2):
        bench.submit(PROMPT, 20, num_choices=2, seed=1)
        bench.submit(OTHER, 20, num_choices=2, seed=2)
    while not any(submission.num_preempted for submission in bench.submissions.values()):
        bench.step()
    statuses = {sequence.status for sequence in bench.batcher.sequences.values()}
    assert statuses == {Status.RUNNING, Status.WAITING} and bench.plans
    bench.rejoin()
    assert bench.submissions == {} and not bench.plans
    (first,) = bench.submit(PROMPT, 6)
    bench.finish()
    assert first.cached == len(PROMPT) - 4
    bench.check_at_rest()


def test_step_under_way() -> None:
    """Blocks that a step in flight writes cannot be found, whether its pass has ended or not; step numbers start
    anew."""
    for has_run in (False, True):
        bench = bench_of()
        bench.submit(PROMPT, 6)
        bench.step()
        bench.submit(OTHER, 6)
        if has_run:
            bench.run_one()
        bench.rejoin()
        (again,) = bench.submit(OTHER, 6)
        assert bench.plans[0].step == 1
        bench.finish()
        assert again.cached == 0 and again.reason == "length"
        (again,) = bench.submit(PROMPT, 6)
        bench.finish()
        assert again.cached == len(PROMPT) - 4
        bench.check_at_rest()


def test_failed_steps() -> None:
    """After a rejoin the generation starts anew: that it failed before does not make its steps be dropped."""
    bench = bench_of()
    bench.submit(PROMPT, 6)
    bench.dials.fail_steps = 1
    bench.run_one()
    bench.rejoin()
    bench.submit(PROMPT, 6)
    assert isinstance(bench.step(), StepDone)
    bench.finish()
    bench.check_at_rest()


def test_pins() -> None:
    """Pinned prefixes stay pinned until they expire; those only marked, or still being computed, are not pinned."""
    bench = bench_of()
    mark = (Breakpoint(8, CacheTtl.FIVE_MINUTES),)
    bench.submit(PROMPT, 1, breakpoints=mark)
    bench.finish()
    assert bench.manager.pool.num_pinned_only == 2
    bench.submit(OTHER, 6, breakpoints=mark)
    assert bench.manager.pins.num_marks
    bench.rejoin()
    assert bench.manager.pool.num_pinned_only == 2 and bench.reports[-1].num_pinned_blocks == 2
    bench.submit([7, 7, 7], 4)
    bench.finish()
    assert bench.manager.pool.num_pinned == 2
    bench.now += 301
    bench.submit([7, 7, 8], 1)
    bench.finish()
    assert bench.manager.pool.num_pinned == 0
    bench.check_at_rest()


def test_without_prefix_caching() -> None:
    """Without prefix caching, a rejoin announces no keys."""
    bench = bench_of(enable_prefix_caching=False)
    bench.submit(PROMPT, 6)
    bench.step()
    num_reports = len(bench.reports)
    bench.rejoin()
    (report,) = bench.reports[num_reports:]
    assert not report.stored_keys and report.num_free_blocks == bench.manager.pool.num_blocks - 1
    bench.submit(PROMPT, 6)
    bench.finish()
    bench.check_at_rest()
