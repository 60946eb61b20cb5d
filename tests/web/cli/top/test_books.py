"""The numbers of `quipu top` are those of the server's books."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx2
import trio

from quipu.web.app import make_app
from quipu.web.cli.top.figures import Figures, Reading, make_figures
from quipu.web.cli.top.server_reader import ServerReader, make_client
from quipu.web.options import AppOptions
from tests.runtimes import Client, small_runtime
from tests.traps.wire import prompt_of, samples, settle


@asynccontextmanager
async def watched(client: Client) -> AsyncIterator[ServerReader]:
    app = make_app(client.runtime.desk, AppOptions(domain="tenant", heartbeat_s=math.inf))
    async with make_client({}, httpx2.ASGITransport(app=app, client=("127.0.0.1", 1))) as http:
        yield ServerReader(http, "http://test")


async def test_books() -> None:
    """Differences between readings add up to the counters, and what is shown are sums of requests' usage."""
    async with small_runtime() as client, watched(client) as reader:
        readings: list[Reading] = [await reader.read()]
        prompt_tokens = cached_tokens = generated_tokens = 0
        for seed in (1, 2, 1, 1, 3):
            answer = await client.ask(prompt_of(70, seed=seed), max_tokens=5)
            await settle(client)
            prompt_tokens += answer.record.prompt_tokens or 0
            cached_tokens += answer.record.cached_tokens or 0
            generated_tokens += answer.record.completion_tokens
            readings.append(await reader.read())
        periods = [make_figures(before, now) for before, now in pairwise(readings)]
        counters = samples(client)
        last = periods[-1]
        assert last is not None and cached_tokens > 0

        def total(of: str) -> int:
            return sum(getattr(period, of) for period in periods if isinstance(period, Figures))

        assert total("prompt_tokens") == prompt_tokens == counters["prompt_tokens_total"]
        assert total("generated_tokens") == generated_tokens == counters["generation_tokens_total"]
        assert total("computed_tokens") == prompt_tokens - cached_tokens
        hits = [period.lately.cached_tokens for period in periods if period is not None]
        assert sum(hits) == cached_tokens == last.since_start.cached_tokens == counters["prefix_cache_hits_total"]
        assert last.since_start.prompt_tokens == counters["prefix_cache_queries_total"]
        assert last.by_tier == {"device": cached_tokens}
        assert last.requests["finished"] == 1 and last.requests_total["finished"] == 5
        assert last.blocks == {
            state: counters[f'kv_blocks{{state="{state}"}}'] for state in ("used", "pinned", "cached", "free")
        }
        assert (last.num_running, last.num_open, last.engines_ready, last.engines_desired) == (0, 0, 1, 1)
        assert readings[-1].tenants is not None and readings[-1].engines is not None
        (tenant,) = readings[-1].tenants
        assert (tenant["requests"], tenant["prompt_tokens"]) == (5, prompt_tokens)
        assert tenant["cached_tokens"] == cached_tokens


async def test_while_a_request_runs(autojump_clock: trio.abc.Clock) -> None:
    """A request is running, and its tokens count as they are streamed, long before it closes."""
    async with small_runtime() as client, watched(client) as reader:
        before = await reader.read()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ask, prompt_of(40))
            while not samples(client)["num_requests_running"]:
                await trio.sleep(0.01)
            now = make_figures(before, await reader.read())
            assert now is not None and (now.num_running, now.num_open) == (1, 1)
            assert now.requests_total["finished"] == 0 and now.blocks["used"] > 0
            assert now.period_s is not None and now.rate(now.prompt_tokens) == 40 / now.period_s
