"""`EngineBench` with a device that runs beside the host: a plan is launched before the one before it is collected."""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.engine.executor.launched_step import LaunchedStep
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.scheduler import StepFailed, StepResult
from quipu.kernels.backend import LaunchedPass
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.fake import FakeBackend
from tests.actors.engine.engine_bench import EngineBench


@attrs.define
class LatePass:
    """A pass that has run, of which the host has not heard yet."""

    outcome: Drawn | Exception
    over: bool = False

    def is_over(self) -> bool:
        return self.over

    def collect(self) -> Drawn:
        self.over = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateBackend(FakeBackend):
    """Runs passes in order. Every other error is raised by the launch, the others where the pass is collected."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.launched: list[LatePass] = []
        self.most_running = 0
        self.next_is_late = True

    def launch(self, batch: StepBatch) -> LaunchedPass:
        outcome: Drawn | Exception
        try:
            outcome = self.step(batch)
        except Exception as error:
            late, self.next_is_late = self.next_is_late, not self.next_is_late
            if not late:
                raise
            outcome = error
        self.launched = [*(one for one in self.launched if not one.over), LatePass(outcome)]
        self.most_running = max(self.most_running, len(self.launched))
        return self.launched[-1]


class AheadBench(EngineBench):
    """Launches a plan behind the running step wherever that is allowed."""

    backend_type = LateBackend

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._following: tuple[StepPlan, LaunchedStep] | None = None
        self.num_ahead = 0
        """Plans that were launched behind another."""
        self.num_failed_before_another = 0

    @property
    def following(self) -> LaunchedStep | None:
        """What was launched behind the step whose result was returned last."""
        return None if self._following is None else self._following[1]

    @property
    def num_sent(self) -> int:
        """Plans whose results the scheduler has not handled yet."""
        return len(self._sent)

    @property
    def backend(self) -> LateBackend:
        assert isinstance(self.executor.backend, LateBackend)
        return self.executor.backend

    def rejoin(self) -> None:
        if self._following is not None:
            self.executor.finish(self._following[1])
            self._following = None
        super().rejoin()

    def run_one(self) -> StepResult:
        executor, plan = self.executor, self.plans.popleft()
        if self._following is not None:
            assert plan is self._following[0]
            step, self._following = self._following[1], None
        else:
            step = executor.launch(plan)
        following = None
        if self.plans and executor.may_follow(step, self.plans[0]):
            following = executor.launch(self.plans[0], behind=step)
            self._following = self.plans[0], following
            self.num_ahead += 1
        result = executor.finish(step, following)
        self.num_failed_before_another += isinstance(result, StepFailed) and following is not None
        self.results.append(result)
        return result
