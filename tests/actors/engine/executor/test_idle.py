"""The backend prepares later passes while there are no sequences, and no plan waits for more than one piece of it."""

from __future__ import annotations

import threading
from typing import cast

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.channel import Channel
from quipu.actors.engine.executor.actor import run_executor
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepDone, StepResult
from quipu.kernels.backend import Backend, RunsAtOnce
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import Dials, FakeBackend
from tests.actors.engine.engine_bench import EngineBench

LIMITS = SchedulerConfig(block_size=4, num_blocks=31, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)


class BusyBackend(RunsAtOnce):
    """Wraps a fake backend; has work to do while idle."""

    def __init__(self, backend: FakeBackend, num_pieces: int) -> None:
        self._backend = backend
        self.num_left = num_pieces
        self.log: list[str] = []
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def step(self, batch: StepBatch) -> Drawn:
        self.log.append("step")
        return self._backend.step(batch)

    def while_idle(self) -> bool:
        self.log.append("piece")
        self.has_begun.set()
        assert self.may_go_on.wait(60)
        self.num_left -= 1
        return self.num_left > 0


def test_nothing_while_there_are_sequences() -> None:
    """The backend prepares nothing while there is a sequence, and continues once it has ended."""
    bench = EngineBench(LIMITS)
    busy = BusyBackend(bench.executor.backend, 2)
    busy.may_go_on.set()
    bench.executor.backend = cast(Backend, busy)
    assert bench.executor.while_idle()
    bench.submit(list(range(100, 110)), 3)
    bench.executor.run(bench.plans[0])
    assert not bench.executor.while_idle()
    bench.executor.drop_sequences()
    assert not bench.executor.while_idle()  # that was the last piece
    assert busy.log == ["piece", "step", "piece"]


@pytest.mark.parametrize(
    ("eos_after", "max_tokens"), [(None, 3), (1, 9), (None, 0)], ids=["length", "end token", "prompt alone"]
)
def test_after_the_last_output(eos_after: int | None, max_tokens: int) -> None:
    """The backend continues once every sequence has all that it may have, before a plan releases it."""
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=4, eos_token_ids=frozenset([5]))
    bench = EngineBench(limits, dials=Dials(eos_after=eos_after, eos_token_id=5))
    busy = BusyBackend(bench.executor.backend, 2)
    busy.may_go_on.set()
    bench.executor.backend = cast(Backend, busy)
    bench.submit([5] * 10, max_tokens)
    for _ in range(3 if max_tokens else 2):
        bench.step()
        assert not bench.executor.while_idle()
    bench.finish()
    assert bench.executor.while_idle() and busy.log[-2:] == ["step", "piece"]


async def test_plan_waits_for_one_piece() -> None:
    """A plan that arrives during a piece of preparation runs before the next piece."""
    bench = EngineBench(LIMITS)
    busy = BusyBackend(bench.executor.backend, 3)
    bench.executor.backend = cast(Backend, busy)
    bench.submit(list(range(100, 110)), 1)
    results = Channel[StepResult](10)
    plans = Channel[StepPlan](10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_executor, bench.executor, plans, results)
        assert await trio.to_thread.run_sync(busy.has_begun.wait, 60)
        plans.post(bench.plans[0])
        await trio.testing.wait_all_tasks_blocked()
        busy.may_go_on.set()
        (result,) = await results.receive_all()
        nursery.cancel_scope.cancel()
    assert isinstance(result, StepDone)
    assert busy.log[:2] == ["piece", "step"]
