"""A runtime with faults injected into the engine's actors and into its link to the web process.

`EngineFaults` has the dials; with all of them off the runtime is correct. Set them once the runtime is warm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import msgspec

from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import LoopHost
from quipu.actors.engine.executor.block_tags import BlockTags
from quipu.actors.engine.executor.fake_drafter import FakeDrafter
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.executor import Admit, StepPlan
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Granted, StepDone, StepResult
from quipu.kernels.backend import Backend
from quipu.kernels.fake import FakeBackend
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
class EngineFaults:
    """The faults to inject, counted in blocks unless noted otherwise."""

    over_read: int = 0
    """The executor confirms this many more than its tags do."""
    under_read: int = 0
    """The executor confirms this many fewer."""
    over_copied: int = 0
    """The executor reports this many copied tokens, although there was no block to copy from."""
    over_grant: int = 0
    """The manager grants this many more than it found, which have other contents."""
    under_report: int = 0
    """The manager reports this many fewer than it granted."""
    overwritten: bool = False
    """Another pass writes to the first granted block without the manager's knowledge."""
    lose: Callable[[StepReport], bool] | None = None
    """Which reports to lose."""
    repeat: bool = False
    """Every report arrives twice."""
    spans_after_terminal: bool = False
    """Computed spans are reported after the sequence's Terminal."""
    no_admissions: bool = False
    """The admission columns are empty."""
    ragged: bool = False
    """One of the admission columns is empty."""
    num_injected: int = 0
    """Faults injected so far."""


class FaultyTags(BlockTags):
    def __init__(self, num_blocks: int, faults: EngineFaults) -> None:
        super().__init__(num_blocks, BLOCK)
        self.faults = faults

    def num_confirmed_tokens(self, table: Sequence[int], keys: Sequence[bytes]) -> int:
        by = self.faults.over_read - self.faults.under_read
        self.faults.num_injected += by != 0
        return super().num_confirmed_tokens(table, keys) + by * BLOCK


class FaultyExecutor(Executor):
    def __init__(self, backend: Backend, max_num_seqs: int, faults: EngineFaults) -> None:
        drafter = FakeDrafter(backend) if isinstance(backend, FakeBackend) else None
        super().__init__(backend, max_num_seqs=max_num_seqs, drafter=drafter)
        self.faults = faults
        self.tags = FaultyTags(backend.memory_plan.num_blocks, faults)

    def run(self, plan: StepPlan) -> StepResult:
        if self.faults.overwritten and plan.admitted and plan.admitted[0].keys:
            self.faults.num_injected += 1
            block = plan.new_blocks[plan.admitted[0].sequence_id][0]
            self._overwrite(block, plan)
        result = super().run(plan)
        if self.faults.over_copied and isinstance(result, StepDone) and result.read_ids:
            self.faults.num_injected += 1
            result = msgspec.structs.replace(result, copied_tokens=[self.faults.over_copied] * len(result.read_ids))
        return result

    def _overwrite(self, block: int, plan: StepPlan) -> None:
        """Run a pass of a sequence that the manager never admitted."""
        ghost = -1
        admit = Admit(
            sequence_id=ghost,
            sampling=SamplingParams(max_tokens=0),
            tokens=list(range(40, 40 + BLOCK)),
            num_outputs=0,
            max_len=BLOCK,
            stop_ids=frozenset(),
            root_key=b"ghost",
            keys=[],
        )
        writing = StepPlan(
            step=plan.step,
            generation=plan.generation,
            released_ids=[],
            admitted=[admit],
            row_ids=[ghost],
            num_going_on=0,
            most_positions=1,
            chunk_starts=[0],
            chunk_counts=[BLOCK],
            new_blocks={ghost: [block]},
        )
        super().run(writing)
        self._release(ghost)


def faulty_grant(
    grant: Callable[[Reserve, float], Granted], faults: EngineFaults, proposal: Reserve, now: float
) -> Granted:
    """Change the block manager's answer as the dials say."""
    granted = grant(proposal, now)
    for index, sequence_id in enumerate(granted.admitted_ids):
        row = granted.sequence_ids.index(sequence_id)
        if faults.over_grant:
            faults.num_injected += 1
            granted.starts[row] += faults.over_grant * BLOCK
            granted.counts[row] -= faults.over_grant * BLOCK
            granted.admitted_reused[index] += faults.over_grant * BLOCK
    return granted


class FaultyLink:
    """The link to the web side. Changed reports are renumbered, unless their loss must be detected."""

    def __init__(self, link: EngineLink, faults: EngineFaults) -> None:
        self._link = link
        self._faults = faults
        self._number = 0
        self._held_back: list[StepReport] = []
        self.incarnation = link.incarnation
        self.take = link.take
        self.lost = link.lost

    async def deliver(self, messages: Iterable[object]) -> None:
        for message in messages:
            if isinstance(message, StepReport):
                await self._link.deliver(self._alter(message))
            else:
                await self._link.deliver([message])

    def _alter(self, report: StepReport) -> list[StepReport]:
        faults = self._faults
        reports = [report]
        if faults.lose is not None and faults.lose(report):
            faults.num_injected += 1
            self._number += 1
            return []
        if faults.under_report and report.admitted_ids:
            faults.num_injected += 1
            fewer = [reused - faults.under_report * BLOCK for reused in report.admitted_reused]
            reports = [msgspec.structs.replace(report, admitted_reused=fewer)]
        if faults.no_admissions and report.admitted_ids:
            faults.num_injected += 1
            reports = [msgspec.structs.replace(report, **NO_ADMISSIONS)]
        if faults.ragged and report.admitted_ids:
            faults.num_injected += 1
            reports = [msgspec.structs.replace(report, admitted_read=[])]
        if faults.spans_after_terminal:
            faults.num_injected += 1
            if report.span_ids:
                self._held_back.append(report)
            reports = [msgspec.structs.replace(report, **NO_SPANS)]
            if report.terminal_ids:
                reports += [self._only_spans(late) for late in self._held_back]
                self._held_back = []
        numbered = []
        for each in reports:
            self._number += 1
            numbered.append(msgspec.structs.replace(each, number=self._number))
        if faults.repeat:
            faults.num_injected += 1
            numbered = [each for each in numbered for _ in range(2)]
        return numbered

    def _only_spans(self, report: StepReport) -> StepReport:
        empty: dict[str, list[Any]] = {
            name: [] for name in StepReport.__struct_fields__ if isinstance(getattr(report, name), list)
        }
        spans = {name: getattr(report, name) for name in NO_SPANS}
        return msgspec.structs.replace(report, **{**empty, **spans}, num_preempted=0, stored_keys=b"", removed_keys=b"")


class FaultyHost(LoopHost):
    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Executor], *, faults: EngineFaults) -> None:
        def load_faulty(config: EngineConfig) -> Executor:
            backend = load(config).backend
            vars(backend)["checks_logits"] = False  # blocks may hold what they should not
            return FaultyExecutor(backend, config.max_num_seqs, faults)

        super().__init__(config, load_faulty)
        self.faults = faults

    async def run(self, link: EngineLink) -> Death:
        return await super().run(FaultyLink(link, self.faults))


@asynccontextmanager
async def faulty_runtime(faults: EngineFaults, **changes: Any) -> AsyncIterator[Client]:
    """Open `small_runtime` with the given faults."""
    async with small_runtime(make_host=partial(FaultyHost, faults=faults), **changes) as client:
        manager = client.engine.block_manager
        manager.grant = partial(faulty_grant, manager.grant, faults)
        yield client
