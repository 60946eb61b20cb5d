"""Plans that wait while a step runs, so that requests that arrive meanwhile are in the next one."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing
from msgspec.structs import replace

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.block_manager.actor import run_block_manager
from quipu.actors.engine.engine import Engine
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.scheduler.actor import SchedulerMessage, run_scheduler
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.engine.scheduler.late_planning import LEAST_S, SHARE, LatePlanning
from quipu.actors.engine.scheduler.planning import Batcher
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Granted, StepDone, Submit
from quipu.kernels.fake import FakeBackend
from tests.actors.engine.block_manager.proposals import keys_of, root_of
from tests.actors.engine.engine_bench import EngineBench

LIMITS = SchedulerConfig(
    block_size=4, num_blocks=31, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100, plans_late=True
)
STEP_S = 0.1
LONG = 30
"""Tokens of a long output."""


def test_waits_for_a_share_of_the_least() -> None:
    """Of recent steps with as few positions, the shortest counts; without any, as much of another as for a position."""
    now = 5.0
    late = LatePlanning(lambda: now)
    late.on_begin()
    assert late.waits_until(1) is None, "nothing is known of any step"
    late.on_done(4, 0.4)
    late.on_done(4, 0.2)
    assert late.waits_until(4) == late.waits_until(9) == pytest.approx(5 + SHARE * 0.2)
    assert late.waits_until(1) == pytest.approx(5 + SHARE * 0.05)
    late.on_done(1, 0.15)
    assert late.waits_until(2) == pytest.approx(5 + SHARE * 0.15)
    late.on_done(300, 1.0)
    assert late.waits_until(2) == pytest.approx(5 + SHARE * 0.15)
    now = 5 + SHARE * 0.15
    assert late.waits_until(4) is None
    late.on_begin()
    assert late.waits_until(4) == pytest.approx(now + SHARE * 0.15)
    late.on_done(4, 0.99 * LEAST_S)
    assert late.waits_until(4) is None, "a short step is planned at once"


def run_step(bench: EngineBench, seconds: float = STEP_S) -> None:
    """Run one plan, which is said to have taken `STEP_S`, and handle its result after so many seconds."""
    bench.run_one()
    result = bench.results[-1]
    assert isinstance(result, StepDone)
    bench.results[-1] = replace(result, seconds=STEP_S)
    bench.now += seconds
    bench.handle_one()


def test_arrivals_join_the_next_step() -> None:
    """A request that arrives while a step begins is in the one behind it; tokens are reported meanwhile."""
    bench = EngineBench(LIMITS)
    (first,) = bench.submit([1], 20)
    run_step(bench)
    run_step(bench)
    (running,) = bench.plans
    assert running.row_ids == [first.id] and len(first.tokens) == 2, "told before the next plan is made"
    (second,) = bench.submit([4, 5, 6], 20)
    assert list(bench.plans) == [running]
    assert bench.batcher.plans_at() == pytest.approx(bench.now + SHARE * STEP_S)
    bench.now += SHARE * STEP_S
    assert bench.batcher.plans_at() is None
    bench.pump()
    assert [plan.row_ids for plan in bench.plans] == [[first.id], [first.id, second.id]]
    bench.finish()
    bench.check_at_rest()


def test_arrivals_after_a_pause() -> None:
    """A step that begins when nothing runs is one that others may still follow in the next step."""
    bench = EngineBench(LIMITS)
    bench.submit([1], 2)
    while bench.plans:
        run_step(bench)
    bench.now += 60
    (first,) = bench.submit([2], 2)
    assert bench.batcher.plans_at() == pytest.approx(bench.now + SHARE * STEP_S)
    (second,) = bench.submit([3], 2)
    bench.now += SHARE * STEP_S
    bench.pump()
    assert [plan.row_ids for plan in bench.plans] == [[first.id], [first.id, second.id]]
    bench.finish()
    bench.check_at_rest()


def test_step_that_ends_early_is_followed_at_once() -> None:
    """A wait ends with the running step, however much sooner than expected that is."""
    bench = EngineBench(LIMITS)
    bench.submit([1], 20)
    run_step(bench)
    run_step(bench)
    (running,) = bench.plans
    run_step(bench, seconds=SHARE * STEP_S / 2)
    (following,) = bench.plans
    assert following.step == running.step + 1
    bench.finish()
    bench.check_at_rest()


@pytest.mark.parametrize(("plans_late", "num_served"), [(False, 8), (True, 10)])
async def test_client_that_asks_again(
    plans_late: bool, num_served: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Beside a long output, requests of two tokens, each sent when the one before has ended, miss one step instead of
    two; no step waits for its plan."""
    bench = EngineBench(attrs.evolve(LIMITS, plans_late=plans_late))
    batcher = Batcher(bench.limits, trio.current_time)
    inbox: Channel[SchedulerMessage] = Channel(8)
    reserve, granted = Channel[Reserve](2), Channel[Granted](2)
    plans, reports = Channel[StepPlan](2), Channel[StepReport](8)
    num_steps = num_unplanned = 0

    def submit(number: int, num_tokens: int) -> None:
        prompt, sampling = [number, 1, 2], SamplingParams(max_tokens=num_tokens)
        inbox.post(Submit(number, prompt, root_of("a", 4), keys_of("a", prompt, 4), sampling, "a"))

    async def execute() -> None:
        nonlocal num_steps, num_unplanned
        sent: list[StepPlan] = []
        while True:
            sent += await plans.receive_all()
            while sent:
                plan = sent.pop(0)
                result = bench.executor.run(plan)
                assert isinstance(result, StepDone)
                await trio.sleep(STEP_S)
                sent += plans.take_nowait()
                num_steps += 1
                num_unplanned += not sent
                inbox.post(replace(result, seconds=STEP_S))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_scheduler, batcher, inbox, reserve, granted, plans, reports)
        nursery.start_soon(run_block_manager, bench.manager, reserve, granted)
        nursery.start_soon(execute)
        began, last = trio.current_time(), 2
        submit(1, LONG)
        submit(last, 2)
        ended: list[int] = []
        while 1 not in ended:
            for report in await reports.receive_all():
                ended += report.terminal_ids
            if last in ended:
                await trio.sleep(STEP_S / 20)
                last += 1
                submit(last, 2)
        nursery.cancel_scope.cancel()
    assert len(ended) - 1 == num_served
    assert num_unplanned <= 1, "only the last step may have none behind it"
    assert num_steps == LONG and trio.current_time() - began == pytest.approx(LONG * STEP_S, abs=STEP_S / 10)


@pytest.mark.parametrize("runs_beside_host", [False, True])
def test_only_where_passes_run_at_once(monkeypatch: pytest.MonkeyPatch, runs_beside_host: bool) -> None:
    """On a device that runs beside the host, the next step is launched before the running one is over."""
    config = EngineConfig(model_path="", executor="fake", num_blocks=10, max_model_len=64, eos_token_ids=())
    executor = load_executor(config)
    capabilities = attrs.evolve(executor.backend.capabilities, runs_beside_host=runs_beside_host)
    monkeypatch.setattr(FakeBackend, "capabilities", capabilities)
    assert Engine(config, executor).batcher.config.plans_late is not runs_beside_host
