"""An engine without the web side, which is asked prompt after prompt: scheduler, block manager, executor and mover.

Used by `bench.tiers`, `bench.tier_trace` and `bench.apart`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from quipu.actors.channel import Channel
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine, EngineNews
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.peers.peer_link import PeerNetwork
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.peers import Fetch, Peer
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.scheduler import Submit
from quipu.actors.shared.block_keys import chain_keys

ROOT_KEY = bytes(32)


@attrs.define
class Served:
    """What the reports of one request say."""

    first_token_s: float
    end_s: float
    """Both from its submission."""
    num_steps: int
    by_tier: dict[str, int]
    step_s: list[float] = attrs.field(factory=list)
    """Between the reports of steps, while it was served."""
    submitted_at: float = 0.0
    """On the machine's clock, `time.perf_counter`."""
    token_ids: list[int] = attrs.field(factory=list)
    token_s: list[float] = attrs.field(factory=list)
    """When each came, from its submission."""

    @property
    def num_token_times(self) -> int:
        """How many steps yielded a token for it."""
        return len(set(self.token_s))


class DrivenEngine:
    """An engine, and the place of the web side beside it."""

    def __init__(self, config: EngineConfig, network: PeerNetwork | None = None) -> None:
        self.engine = Engine(config, load_executor(config), network)
        self._block_size = config.block_size
        self.reports: Channel[EngineNews] = Channel(8)
        self.num_moved: Counter[tuple[str, str]] = Counter()
        """Blocks that were stored in a tier, and loaded from it."""
        self._next_id = 1

    async def ask(
        self, *prompts: list[int], max_tokens: int = 1, temperature: float = 0.0, seed: int = 0, **fields: Any
    ) -> list[Served]:
        """Serve prompts beside each other, to their ends. `seed`: the first one's. `fields`: further ones of each
        `Submit`."""
        started = time.perf_counter()
        served: dict[int, Served] = {}
        open_ids: set[int] = set()
        for prompt in prompts:
            keys = chain_keys(ROOT_KEY, prompt, self._block_size)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + len(served))
            served[self._next_id] = Served(0.0, 0.0, 0, {}, submitted_at=started)
            open_ids.add(self._next_id)
            await self.engine.receive(Submit(self._next_id, prompt, ROOT_KEY, keys, sampling, **fields))
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
                for sequence_id, token_id in zip(report.token_sequence_ids, report.token_ids, strict=True):
                    one = served[sequence_id]
                    one.first_token_s = one.first_token_s or now
                    one.token_ids.append(token_id)
                    one.token_s.append(now)
                for sequence_id in report.terminal_ids:
                    open_ids.discard(sequence_id)
                    served[sequence_id].end_s, served[sequence_id].num_steps = now, num_steps
                    served[sequence_id].step_s = step_s
        return list(served.values())

    async def fetch(self, prompt: list[int], peer: Peer) -> None:
        """Fetch a prompt from another engine, ahead of the next sequence that is asked."""
        keys = chain_keys(ROOT_KEY, prompt, self._block_size)
        await self.engine.receive(Fetch(self._next_id, prompt, ROOT_KEY, keys, peer))


@asynccontextmanager
async def running(config: EngineConfig, network: PeerNetwork | None = None) -> AsyncIterator[DrivenEngine]:
    """Load an engine and run it until the block is left. `network`: the way to others that may fetch its blocks."""
    driven = DrivenEngine(config, network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driven.engine.run, driven.reports)
        yield driven
        nursery.cancel_scope.cancel()
    driven.engine.close()
    driven.engine.executor.backend.close()
