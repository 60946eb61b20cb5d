"""An engine without the web side, which is asked prompt after prompt: scheduler, block manager, executor and mover.

Used by `bench.tiers` and `bench.tier_trace`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine, EngineNews
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.actors.shared.block_keys import chain_keys

ROOT_KEY = bytes(32)


@attrs.define
class Served:
    """What a reports of one request say."""

    first_token_s: float
    end_s: float
    """Both from its submission."""
    num_steps: int
    by_tier: dict[str, int]
    step_s: list[float] = attrs.field(factory=list)
    """Between the reports of steps, while it was served."""


class DrivenEngine:
    """An engine, and the place of the web side beside it."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config, load_executor(config))
        self._block_size = config.block_size
        self.reports: Channel[EngineNews] = Channel(8)
        self.num_moved: Counter[tuple[str, str]] = Counter()
        """Blocks that were stored in a tier, and loaded from it."""
        self._next_id = 1

    async def ask(self, *prompts: list[int], max_tokens: int = 1) -> list[Served]:
        """Serve prompts beside each other, to their ends."""
        started = time.perf_counter()
        served: dict[int, Served] = {}
        open_ids: set[int] = set()
        for prompt in prompts:
            keys = chain_keys(ROOT_KEY, prompt, self._block_size)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            served[self._next_id] = Served(0.0, 0.0, 0, {})
            open_ids.add(self._next_id)
            await self.engine.receive(Submit(self._next_id, prompt, ROOT_KEY, keys, sampling))
            self._next_id += 1
        num_steps = 0
        reported, step_s = 0.0, []
        while open_ids:
            for report in await self.reports.receive_all():
                if not isinstance(report, StepReport):
                    continue
                now = time.perf_counter() - started
                for tier in report.tiers:
                    self.num_moved["stored", tier.tier.value] += tier.num_stored
                    self.num_moved["loaded", tier.tier.value] += tier.num_loaded
                num_steps += bool(report.span_ids)
                if report.span_ids:
                    step_s.append(now - reported)
                    reported = now
                for index, sequence_id in enumerate(report.admitted_ids):
                    tiers = report.admitted_tiers[index] if report.admitted_tiers else None
                    served[sequence_id].by_tier = tiers or {"device": report.admitted_reused[index]}
                for sequence_id in report.token_sequence_ids:
                    served[sequence_id].first_token_s = served[sequence_id].first_token_s or now
                for sequence_id in report.terminal_ids:
                    open_ids.discard(sequence_id)
                    served[sequence_id].end_s, served[sequence_id].num_steps = now, num_steps
                    served[sequence_id].step_s = step_s
        return list(served.values())


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[DrivenEngine]:
    """Load an engine and run it until the block is left."""
    driven = DrivenEngine(config)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driven.engine.run, driven.reports)
        yield driven
        nursery.cancel_scope.cancel()
    driven.engine.close()
    driven.engine.executor.backend.close()
