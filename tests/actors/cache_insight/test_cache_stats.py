"""The cache watch's figures for whole requests, through every actor, on the KV-reading fake executor."""

from __future__ import annotations

import pytest
import structlog.testing
import trio

from quipu.actors.cache_insight import cache_watch
from quipu.actors.cache_insight.cache_figures import CacheFigures, Reuse
from quipu.actors.messages.accountant import Caller
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, small_runtime
from tests.several_engines import engines, parametrize
from tests.traps.wire import over_http
from tests.web.api.anthropic.messages_api import PATH

__all__ = ["engines"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, two_engines=True, several_tokens=True)


def figures_of(client: Client) -> CacheFigures:
    return client.runtime.desk.cache.overall()


def reuse_of(client: Client) -> Reuse:
    reuse = figures_of(client).reuse
    assert reuse is not None
    return reuse


async def test_requests_and_their_blocks(autojump_clock: trio.abc.Clock) -> None:
    """Figures agree with the numbers reported to clients, whichever engine served them; each prompt counts once."""
    prompt = prompt_of(5 * BLOCK + 3)
    async with small_runtime() as client:
        answers = [await client.ask(prompt, max_tokens=2) for _ in range(3)]
        both = await client.ask(prompt, prompt_of(2 * BLOCK + 1, seed=4), n=2, max_tokens=2)
        figures = figures_of(client)
        client.assert_at_rest()
    records = [answer.record for answer in (*answers, both)]
    assert figures.num_requests == 4 and figures.num_hits == 3
    assert figures.prompt_tokens == sum(record.prompt_tokens or 0 for record in records)
    assert figures.cached_tokens == sum(record.cached_tokens or 0 for record in records)
    reuse = figures.reuse
    assert reuse is not None and (reuse.query_blocks, reuse.hit_blocks) == (4 * 5 + 2, 3 * 5)
    assert reuse.sampled_share == 1.0


async def test_output_blocks_could_be_found(autojump_clock: trio.abc.Clock) -> None:
    """Blocks that decoding filled count as possible hits of the next turn, even if the cache was reset."""
    prompt = prompt_of(2 * BLOCK)
    turn = prompt + continuation(prompt, 3 * BLOCK) + prompt_of(5, seed=2)
    async with small_runtime() as client:
        await client.ask(prompt, max_tokens=3 * BLOCK)
        client.runtime.desk.reset_prefix_cache()
        answer = await client.ask(turn, max_tokens=1)
        reuse = reuse_of(client)
        client.assert_at_rest()
    assert answer.record.cached_tokens == 0, "the cache was reset"
    assert reuse.query_blocks == 1 + 5
    assert reuse.hit_blocks == 4, "the last block of the output lacks its last token's KV"


async def test_prompt_that_may_not_read(autojump_clock: trio.abc.Clock) -> None:
    """A prompt whose logprobs are requested may not read the cache, so it has no possible hits."""
    prompt = prompt_of(3 * BLOCK + 1)
    async with small_runtime() as client:
        await client.ask(prompt, max_tokens=1)
        await client.ask(prompt, max_tokens=1, echo=True, logprobs=0)
        reuse = reuse_of(client)
        client.assert_at_rest()
    assert (reuse.query_blocks, reuse.hit_blocks) == (3, 0)


async def test_idle_time_of_evicted_blocks(autojump_clock: trio.abc.Clock) -> None:
    """When blocks run out, the figures have the time for which those evicted had been idle."""
    async with small_runtime(num_blocks=12, max_model_len=128) as client:
        for seed in range(12):
            await client.ask(prompt_of(5 * BLOCK + 1, seed=seed), max_tokens=1)
            await trio.sleep(7)
        evictions = figures_of(client).evictions
        client.assert_at_rest()
    assert evictions is not None and evictions.num_sampled > 0
    assert evictions.idle_s[0.5] >= 7


async def test_tenant_and_model_of_the_caller(autojump_clock: trio.abc.Clock) -> None:
    """A request counts in the row of the tenant that is billed and the model name that it asked for."""
    async with small_runtime() as client:
        request = client.encode(prompt_of(40), max_tokens=1)
        ticket = client.runtime.desk.open(request, "test", Caller(tenant="acme", model="demo-alias"))
        try:
            await ticket.start()
            while ticket.mailbox.closed is None:
                await trio.sleep(0.01)
        finally:
            ticket.leave()
        (row,) = client.runtime.desk.cache.figures()
        client.assert_at_rest()
    assert (row.tenant, row.model, row.num_requests) == ("acme", "demo-alias", 1)


async def test_pinned_prefixes(autojump_clock: trio.abc.Clock) -> None:
    """A marked prefix counts as pinned for its tenant, and its blocks as held only by a pin until it is released."""
    system = {"type": "text", "text": "The cords are counted. " * 20, "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "demo",
        "max_tokens": 2,
        "system": [system],
        "messages": [{"role": "user", "content": "what?"}],
    }
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(PATH, body)
        await client.ask(prompt_of(5), max_tokens=1)
        figures, pinned = figures_of(client), client.runtime.desk.cache.pinned()
        client.runtime.desk.reset_prefix_cache()
        await client.ask(prompt_of(5), max_tokens=1)
        await client.ask(prompt_of(5), max_tokens=1)
        after = client.runtime.desk.cache.pinned()
    created = answer["usage"]["cache_creation_input_tokens"]
    assert exchange.status == 200 and created > 0
    assert (figures.pins.num_prompts, figures.pins.num_tokens) == (1, created)
    assert (pinned.num_blocks, after.num_blocks) == (created // BLOCK, 0)


async def test_no_hits_are_logged_once(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """That many requests have found nothing in the cache is logged once."""
    monkeypatch.setattr(cache_watch, "NO_HITS_AFTER", 10)
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(num_engines=1, num_blocks=12, max_model_len=128) as client:
            for number in range(12):
                await client.ask(prompt_of(5 * BLOCK + 1, seed=number % 4), max_tokens=1)
            client.assert_at_rest()
    (line,) = [line for line in lines if line["event"] == "prefix_cache.no_hits"]
    assert (line["log_level"], line["num_requests"]) == ("warning", 10)
    assert line["possible_hit_rate"] == pytest.approx(6 * 5 * BLOCK / (10 * (5 * BLOCK + 1)), abs=0.001)


async def test_metrics_show_the_same(autojump_clock: trio.abc.Clock) -> None:
    """The metrics have the figures of all tenants together, for the window only."""
    prompt = prompt_of(4 * BLOCK + 1)
    async with small_runtime(stats_window_s=600.0) as client:
        for _ in range(4):
            await client.ask(prompt, max_tokens=1)
        text = client.runtime.metrics.render().decode()
        figures = figures_of(client)
        await trio.sleep(700)
        later = client.runtime.metrics.render().decode()
        client.assert_at_rest()
    assert figures.reuse is not None
    values = {
        line.rpartition(" ")[0].partition("{")[0] + line.rpartition(" ")[0].partition('model_name="demo"')[2]: float(
            line.rpartition(" ")[2]
        )
        for line in text.splitlines()
        if line.startswith("quipu:cache_")
    }
    assert values["quipu:cache_window_hit_ratio}"] == figures.hit_rate
    assert figures.hit_rate == figures.cached_tokens / figures.prompt_tokens > 0
    assert values["quipu:cache_possible_hit_ratio}"] == figures.reuse.hit_rate == figures.hit_rate
    assert values['quipu:cache_blocks_for_hits,share="0.99"}'] == figures.reuse.blocks[0.99] == 4
    assert values["quipu:cache_pinned_tokens}"] == 0
    assert "quipu:cache_window_hit_ratio{" not in later
