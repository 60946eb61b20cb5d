"""A runtime in which somebody lies to the books: each actor of the engine, and the way between the processes.

`Lies` are the dials; with all of them off the runtime is honest. Turn them once the runtime is warm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import msgspec

from quipu.actors.config import EngineConfig
from quipu.actors.engine import LoopHost
from quipu.actors.executor.block_tags import BlockTags
from quipu.actors.executor.executor import Executor
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Granted, StepDone, StepResult
from quipu.actors.supervisor import Death, EngineLink
from quipu.kernels.backend import Backend
from tests.runtimes import BLOCK, Client, small_runtime

NO_SPANS: dict[str, list[Any]] = {"span_ids": [], "span_starts": [], "span_ends": []}
NO_ADMISSIONS: dict[str, list[Any]] = {
    "admitted_ids": [],
    "admitted_number": [],
    "admitted_reused": [],
    "admitted_read": [],
    "admitted_miss_reasons": [],
    "admitted_miss_tokens": [],
    "admitted_copyable": [],
    "admitted_copied": [],
}


@attrs.define
class Lies:
    """What is not true. Blocks are counted in blocks."""

    over_read: int = 0
    """The executor confirms so many more than its tags do."""
    under_read: int = 0
    """... or fewer."""
    over_copied: int = 0
    """It says that it has copied so many tokens more, which no block was offered for."""
    over_grant: int = 0
    """The manager grants so many blocks beyond those that it found: they hold something else."""
    under_report: int = 0
    """The manager books so many fewer than it granted."""
    overwritten: bool = False
    """Another pass has written to the first granted block, and the manager does not know."""
    lose: Callable[[StepReport], bool] | None = None
    """Reports that do not arrive."""
    repeat: bool = False
    """Every report arrives twice."""
    spans_after_terminal: bool = False
    """What was computed is told after the last word on the sequence."""
    no_admissions: bool = False
    """The columns of admissions are empty."""
    ragged: bool = False
    """One of them is."""
    num_told: int = 0
    """Lies told."""


class LyingTags(BlockTags):
    def __init__(self, num_blocks: int, lies: Lies) -> None:
        super().__init__(num_blocks, BLOCK)
        self.lies = lies

    def num_confirmed_tokens(self, table: Sequence[int], keys: Sequence[bytes]) -> int:
        by = self.lies.over_read - self.lies.under_read
        self.lies.num_told += by != 0
        return super().num_confirmed_tokens(table, keys) + by * BLOCK


class LyingExecutor(Executor):
    def __init__(self, backend: Backend, max_num_seqs: int, lies: Lies) -> None:
        super().__init__(backend, max_num_seqs=max_num_seqs)
        self.lies = lies
        self._tags = LyingTags(backend.memory_plan.num_blocks, lies)

    def run(self, plan: StepPlan) -> StepResult:
        if self.lies.overwritten and plan.admitted_ids and plan.admitted_keys[0]:
            self.lies.num_told += 1
            block = plan.row_new_blocks[plan.row_ids.index(plan.admitted_ids[0])][0]
            self._overwrite(block, plan)
        result = super().run(plan)
        if self.lies.over_copied and isinstance(result, StepDone) and result.read_ids:
            self.lies.num_told += 1
            result = msgspec.structs.replace(result, copied_tokens=[self.lies.over_copied] * len(result.read_ids))
        return result

    def _overwrite(self, block: int, plan: StepPlan) -> None:
        """A pass of somebody whom the manager never admitted."""
        ghost = -1
        columns: dict[str, Any] = {name: [] for name in StepPlan.__struct_fields__}
        columns.update(step=plan.step, generation=plan.generation, admitted_ids=[ghost], admitted_root_keys=[b"ghost"])
        columns.update(admitted_sampling=[SamplingParams(max_tokens=1)], admitted_keys=[[]], admitted_tokens=[[]])
        columns.update(admitted_num_outputs=[0], row_ids=[ghost], row_epochs=[0], row_starts=[0], row_counts=[BLOCK])
        columns.update(row_new_blocks=[[block]], row_token_ids=[list(range(40, 40 + BLOCK))], row_samples=[False])
        super().run(StepPlan(**columns))
        self._release(ghost)


def lying_grant(grant: Callable[[Reserve, float], Granted], lies: Lies, proposal: Reserve, now: float) -> Granted:
    """The block manager's answer, as the dials have it."""
    granted = grant(proposal, now)
    for index, sequence_id in enumerate(granted.admitted_ids):
        row = granted.sequence_ids.index(sequence_id)
        if lies.over_grant:
            lies.num_told += 1
            granted.starts[row] += lies.over_grant * BLOCK
            granted.counts[row] -= lies.over_grant * BLOCK
            granted.admitted_reused[index] += lies.over_grant * BLOCK
    return granted


class LyingLink:
    """One engine's way to the web side. What it changes is numbered anew, unless it is meant to be missed."""

    def __init__(self, link: EngineLink, lies: Lies) -> None:
        self._link = link
        self._lies = lies
        self._number = 0
        self._held_back: list[StepReport] = []
        self.incarnation = link.incarnation
        self.take = link.take
        self.lost = link.lost

    async def deliver(self, messages: Iterable[object]) -> None:
        for message in messages:
            if isinstance(message, StepReport):
                await self._link.deliver(self._distort(message))
            else:
                await self._link.deliver([message])

    def _distort(self, report: StepReport) -> list[StepReport]:
        lies = self._lies
        reports = [report]
        if lies.lose is not None and lies.lose(report):
            lies.num_told += 1
            self._number += 1
            return []
        if lies.under_report and report.admitted_ids:
            lies.num_told += 1
            less = [reused - lies.under_report * BLOCK for reused in report.admitted_reused]
            reports = [msgspec.structs.replace(report, admitted_reused=less)]
        if lies.no_admissions and report.admitted_ids:
            lies.num_told += 1
            reports = [msgspec.structs.replace(report, **NO_ADMISSIONS)]
        if lies.ragged and report.admitted_ids:
            lies.num_told += 1
            reports = [msgspec.structs.replace(report, admitted_read=[])]
        if lies.spans_after_terminal:
            lies.num_told += 1
            self._held_back.append(report)
            reports = [msgspec.structs.replace(report, **NO_SPANS)]
            if report.terminal_ids:
                reports += [self._only_spans(late) for late in self._held_back]
                self._held_back = []
        numbered = []
        for each in reports:
            self._number += 1
            numbered.append(msgspec.structs.replace(each, number=self._number))
        if lies.repeat:
            lies.num_told += 1
            numbered = [each for each in numbered for _ in range(2)]
        return numbered

    def _only_spans(self, report: StepReport) -> StepReport:
        empty: dict[str, list[Any]] = {
            name: [] for name in StepReport.__struct_fields__ if isinstance(getattr(report, name), list)
        }
        spans = {name: getattr(report, name) for name in NO_SPANS}
        return msgspec.structs.replace(report, **{**empty, **spans}, num_preempted=0)


class LyingHost(LoopHost):
    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Executor], *, lies: Lies) -> None:
        def load_liar(config: EngineConfig) -> Executor:
            return LyingExecutor(load(config).backend, config.max_num_seqs, lies)

        super().__init__(config, load_liar)
        self.lies = lies

    async def run(self, link: EngineLink) -> Death:
        return await super().run(LyingLink(link, self.lies))


@asynccontextmanager
async def lying_runtime(lies: Lies, **changes: Any) -> AsyncIterator[Client]:
    """`small_runtime`, with dials for lies."""
    async with small_runtime(make_host=partial(LyingHost, lies=lies), **changes) as client:
        manager = client.engine.block_manager
        manager.grant = partial(lying_grant, manager.grant, lies)
        yield client
