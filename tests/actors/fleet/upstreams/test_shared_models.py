"""A model that engines of this server and an upstream both serve, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx2
import pytest
import trio

from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.request_desk import upstream_pool
from quipu.actors.request_desk.health import State
from quipu.web.app import make_app
from quipu.web.http.server import ServerConfig, serve
from tests.journals import KeptJournal
from tests.runtimes import Client, kill_engine, small_runtime
from tests.upstreams import ASK, CHAT, PATIENCE_S, USAGE, FakeUpstream, Script, hello

OWN = 0
"""The id of the engine."""


class HeldHost(LoopHost):
    """An engine that loads for as long as the test says."""

    is_held = False

    async def run(self, link: EngineLink) -> Death:
        while HeldHost.is_held:
            await trio.sleep(0.002)
        return await super().run(link)


@attrs.frozen
class Shared:
    client: Client
    fake: FakeUpstream
    http: httpx2.AsyncClient
    journal: KeptJournal

    async def ask(self, path: str = CHAT, /, **fields: Any) -> httpx2.Response:
        return await self.http.post(path, json=ASK | {"max_tokens": 3} | fields)

    @asynccontextmanager
    async def held_engine(self, path: str = CHAT, /, **fields: Any) -> AsyncIterator[list[httpx2.Response]]:
        """Kill the engine with a request that then waits for it, and keep it loading until the block is left.

        A second request, with these fields, is sent meanwhile. Yields the list to which both responses are added.
        """
        answers: list[httpx2.Response] = []
        desk = self.client.runtime.desk

        async def ask(path: str, fields: dict[str, Any]) -> None:
            answers.append(await self.ask(path, **fields))

        HeldHost.is_held = True
        kill_engine(self.client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, CHAT, {"seed": 1})
            try:
                while desk.pool[OWN].is_ready:
                    await trio.sleep(0.002)
                nursery.start_soon(ask, path, fields)
                while desk.num_open_requests < 2:
                    await trio.sleep(0.002)
                yield answers
            finally:
                HeldHost.is_held = False


@asynccontextmanager
async def open_shared(script: Script = hello) -> AsyncIterator[Shared]:
    """Serve the model `far` with an engine and a fake upstream."""
    fake, journal = FakeUpstream(script), KeptJournal()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(fake.run)
            upstreams = (UpstreamConfig(url=fake.url),)
            async with small_runtime(
                make_host=HeldHost, journal=journal, upstreams=upstreams, model_names=("far",), num_engines=1
            ) as client:
                while not client.runtime.desk.info.shared:
                    await trio.sleep(0.002)
                run = partial(serve, make_app(client.runtime.desk), host="127.0.0.1", port=0)
                config = ServerConfig(graceful_timeout_s=0.1)
                (address,) = await nursery.start(partial(run, config=config, shutdown_trigger=trio.sleep_forever))
                async with httpx2.AsyncClient(base_url=address.url, timeout=None, trust_env=False) as http:
                    yield Shared(client, fake, http, journal)
            nursery.cancel_scope.cancel()


async def test_engine_serves_while_it_has_nothing_else() -> None:
    """An idle engine is preferred to an idle upstream; the model is listed once, as this server's."""
    async with open_shared() as shared:
        for _ in range(3):
            assert (await shared.ask()).status_code == 200
        assert not shared.fake.asked
        (model,) = (await shared.http.get("/v1/models")).json()["data"]
        assert (model["id"], model["block_size"]) == ("far", 16)


async def test_upstream_serves_while_the_engine_is_busy() -> None:
    """Simultaneous requests are shared; each is booked where it was served, and the load counts return to zero."""
    async with open_shared() as shared:
        answers: list[httpx2.Response] = []

        async def ask(number: int) -> None:
            answers.append(await shared.ask(messages=[{"role": "user", "content": f"{number} " + "word " * 40}]))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, number)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert 2 <= len(shared.fake.asked) <= 6
        assert sum(answer.json()["usage"] == USAGE for answer in answers) == len(shared.fake.asked)
        said = [record.upstream_usage is not None for record in shared.journal.closed]
        assert len(said) == 8 and sum(said) == len(shared.fake.asked)
        shared.fake.asked.clear()
        assert (await shared.ask()).json()["usage"] != USAGE and not shared.fake.asked, "both must count as idle again"


async def test_upstream_stands_in_for_an_engine_that_loads() -> None:
    """While no engine is ready, the upstream serves and the server is ready; then the engine serves again."""
    async with open_shared() as shared:
        async with shared.held_engine(seed=1) as waiting:
            for _ in range(3):
                assert (await shared.ask()).json()["usage"] == USAGE
            health = shared.client.runtime.desk.health()
            assert health.state is State.READY and "upstreams serve" in health.detail
            assert (await shared.http.get("/ready")).status_code == 200
            assert not waiting
        assert [answer.status_code for answer in waiting] == [200] * 2
        assert (await shared.ask()).json()["usage"] != USAGE and len(shared.fake.asked) == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"seed": 1}),
        (CHAT, {"top_k": 3}),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/messages", {}),
    ],
)
async def test_what_only_engines_can_do_stays_here(path: str, fields: dict[str, Any]) -> None:
    """A request with a field that other servers may not know waits for the engine, even if that is restarting."""
    async with open_shared() as shared:
        async with shared.held_engine(path, **fields) as waiting:
            assert (await shared.ask()).json()["usage"] == USAGE
            assert not waiting
        assert [answer.status_code for answer in waiting] == [200] * 2 and len(shared.fake.asked) == 1


async def test_engine_serves_alone_when_the_upstream_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream that is unhealthy gets no requests, however busy the engine is."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.02)
    async with open_shared() as shared:
        desk = shared.client.runtime.desk
        assert desk.upstreams is not None
        shared.fake.is_healthy = False
        while desk.upstreams.pool.stands_in(["far"]):
            await trio.sleep(0.02)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(shared.ask)
        assert not shared.fake.asked and len(shared.journal.closed) == 6
