"""Two engines in one loop that may fetch each other's blocks, for tests: what a router would tell them is said here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine, EngineNews
from quipu.actors.engine.peers.peer_link import LoopNetwork, PeerNetwork
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.peers import Fetch, Peer
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.actors.shared.block_keys import chain_keys
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.runtimes import load_with_kept_vocabulary
from tests.tiny import BLOCK, TINY

ROOT = bytes(32)


@attrs.define
class Admitted:
    """One admission, as its report says it."""

    reused: int
    read: int
    side: str
    by_tier: dict[str, int]


@attrs.define
class Answer:
    tokens: list[int] = attrs.field(factory=list)
    admissions: list[Admitted] = attrs.field(factory=list)
    computed: list[tuple[int, int]] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    over: trio.Event = attrs.field(factory=trio.Event)
    error: str | None = None

    @property
    def num_computed(self) -> int:
        return sum(end - start for start, end in self.computed)


@attrs.define(eq=False)
class Side:
    """One engine, and what it has reported."""

    engine: Engine
    engine_id: int
    answers: dict[int, Answer] = attrs.field(factory=dict)
    reports: Channel[EngineNews] = attrs.field(factory=lambda: Channel[EngineNews](8))
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    num_free_blocks: int | None = None
    """As its last report says."""

    @property
    def peer(self) -> Peer:
        return Peer(self.engine_id, self.engine.ready(1).peer_address)

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.engine.run, self.reports)
                nursery.start_soon(self._read)
        self.engine.close()

    async def _read(self) -> None:
        while True:
            for report in await self.reports.receive_all():
                assert isinstance(report, StepReport)
                self._note(report)

    def _note(self, report: StepReport) -> None:
        self.num_free_blocks = report.num_free_blocks
        num = len(report.admitted_ids)
        for at, sequence_id in enumerate(report.admitted_ids):
            tiers = (report.admitted_tiers or [{}] * num)[at] or {}
            side = (report.admitted_sides or ["prefill"] * num)[at]
            admitted = Admitted(report.admitted_reused[at], report.admitted_read[at], side, tiers)
            self.answers[sequence_id].admissions.append(admitted)
        for sequence_id, start, end in zip(report.span_ids, report.span_starts, report.span_ends, strict=True):
            self.answers[sequence_id].computed.append((start, end))
        for sequence_id, token_id in zip(report.token_sequence_ids, report.token_ids, strict=True):
            self.answers[sequence_id].tokens.append(token_id)
        for sequence_id, reason in zip(report.ended_ids, report.ended_reasons, strict=True):
            self.answers[sequence_id].ended.append(reason)
        for sequence_id, error in zip(report.terminal_ids, report.terminal_errors, strict=True):
            self.answers[sequence_id].error = error
            self.answers[sequence_id].over.set()

    async def submit(self, sequence_id: int, prompt: list[int], *, max_tokens: int = 6, **fields: Any) -> Answer:
        """Submit a sequence and return what will be reported of it."""
        answer = self.answers[sequence_id] = Answer()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        await self.engine.receive(
            Submit(sequence_id, prompt, ROOT, chain_keys(ROOT, prompt, BLOCK), sampling, **fields)
        )
        return answer

    async def serve(self, sequence_id: int, prompt: list[int], **fields: Any) -> Answer:
        """Submit a sequence and wait for its end."""
        answer = await self.submit(sequence_id, prompt, **fields)
        await answer.over.wait()
        return answer

    async def fetch(self, sequence_id: int, prompt: list[int], peer: Peer) -> None:
        await self.engine.receive(Fetch(sequence_id, prompt, ROOT, chain_keys(ROOT, prompt, BLOCK), peer))

    def check(self) -> None:
        """Check the block manager, and that nothing is lent or on its way."""
        manager = self.engine.block_manager
        check_manager(manager)
        assert not manager.lending.num_blocks
        assert manager.tiers is None or not manager.tiers.loads.are_under_way


def pair_config(**changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model_path": str(TINY),
        "executor": "fake",
        "block_size": BLOCK,
        "num_blocks": 64,
        "max_model_len": 40 * BLOCK,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4 * BLOCK,
        "eos_token_ids": (),
        "fake_step_seconds": 0.0,
        "has_peers": True,
    }
    return EngineConfig(**{**defaults, **changes})


@asynccontextmanager
async def open_sides(
    count: int = 2, network: PeerNetwork | None = None, *, configs: list[EngineConfig] | None = None
) -> AsyncIterator[list[Side]]:
    """Run engines until the block is left; then check them."""
    network = LoopNetwork() if network is None else network
    configs = [pair_config()] * count if configs is None else configs
    sides = [Side(Engine(config, load_with_kept_vocabulary(config), network), at) for at, config in enumerate(configs)]
    async with trio.open_nursery() as nursery:
        for side in sides:
            nursery.start_soon(side.run)
        yield sides
        for side in sides:
            side.scope.cancel()
    for side in sides:
        side.engine.executor.close()
