"""vLLM's and SGLang's probes and descriptions: what they say, to whom, and that a probe's token is booked."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import attrs
import pytest
import trio

from quipu.actors.config.pooling_config import Task
from quipu.actors.request_desk.health import EngineState, EngineStatus, State
from quipu.kernels.fake import Dials
from quipu.web.api.admin import peer_probes
from tests.journals import KeptJournal
from tests.runtimes import small_runtime
from tests.traps.wire import over_http, samples, settle
from tests.web.api.openapi.full_apps import ADMIN, TENANT, full_app, keyed
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk

NUM_TOKENS = "generation_tokens_total"


async def ask(client: Client, path: str, method: str = "GET", key: str | None = None) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client.open(method, path, headers=headers) as exchange:
        status = await exchange.wait_started()
        data = await exchange.read()
    return status, json.loads(data) if data.startswith(b"{") else data


async def test_ping() -> None:
    """Both methods tell what `/health` does."""
    desk = FakeDesk()
    client = Client(full_app(desk=desk))
    for state in (State.READY, State.FAILED):
        desk.state = state
        expected = await ask(client, "/health")
        assert await ask(client, "/ping") == await ask(client, "/ping", "POST") == expected
    assert expected[0] == HTTPStatus.SERVICE_UNAVAILABLE


async def test_load_counts_open_requests(autojump_clock: trio.abc.Clock) -> None:
    """A request counts from its arrival until its response has ended."""
    async with small_runtime(Dials(step_seconds=0.01)) as runtime:
        client = over_http(runtime)
        assert await ask(client, "/load") == (200, {"server_load": 0})
        body = {"prompt": [7] * 20, "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with client.open("POST", "/v1/completions", body) as exchange:
            await exchange.wait_started()
            assert await ask(client, "/load") == (200, {"server_load": 1})
            await exchange.read()
        await settle(runtime)
        assert await ask(client, "/load") == (200, {"server_load": 0})


async def test_generate_probe_is_booked(autojump_clock: trio.abc.Clock) -> None:
    """The probe generates one token from one, which the journal and the counters have, like any other request."""
    journal = KeptJournal()
    async with small_runtime(Dials(step_seconds=0.01), journal=journal) as runtime:
        client = over_http(runtime)
        assert await ask(client, "/health_generate") == (200, b"")
        await settle(runtime)
        assert samples(runtime)[NUM_TOKENS] == 1
    (record,) = journal.closed
    assert (record.prompt_tokens, record.completion_tokens, record.endpoint) == (1, 1, "/health_generate")


async def test_generate_probe_fails_in_time(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no token comes, the probe is answered all the same, and nothing of it remains."""
    monkeypatch.setattr(peer_probes, "PROBE_TIMEOUT_S", 2.0)
    async with small_runtime(Dials(step_seconds=3.0)) as runtime:
        client = over_http(runtime)
        status, answer = await ask(client, "/health_generate")
        assert status == HTTPStatus.SERVICE_UNAVAILABLE and "2 seconds" in answer["error"]["message"]
        await settle(runtime)
        assert runtime.runtime.desk.num_open_requests == 0


async def test_descriptions() -> None:
    """SGLang's fields have the server's numbers; without engines there is nothing to generate with."""
    engines = [
        EngineStatus(number, 1, EngineState.READY, blocks_used=25, blocks_total=100, num_running=3, num_waiting=2)
        for number in range(2)
    ]
    desk = FakeDesk(engine_list=engines)
    client = Client(full_app(desk=desk))
    _, model = await ask(client, "/get_model_info")
    assert (model["model_path"], model["max_context_length"], model["is_generation"]) == ("org/tiny", 64, True)
    _, server = await ask(client, "/get_server_info")
    assert (server["dp_size"], server["max_total_num_tokens"], server["dtype"]) == (2, 3200, "float32")
    first = {"engine": 0, "state": "ready", "num_running_reqs": 3, "num_queue_reqs": 2, "token_usage": 0.25}
    assert server["internal_states"][0] == first
    desk.info = attrs.evolve(INFO, task=Task.EMBED)
    assert (await ask(client, "/get_model_info"))[1]["is_generation"] is False
    desk.info = attrs.evolve(INFO, model_names=(), settings={}, has_engines=False)
    status, answer = await ask(client, "/health_generate")
    assert (status, answer["error"]["code"]) == (HTTPStatus.CONFLICT, "no_engines")
    assert (await ask(client, "/get_model_info"))[1]["model_path"] is None


async def test_who_may_ask() -> None:
    """With keys, load and server are for admins; the model is described to every key."""
    client = Client(full_app(keyed()))
    for path in ("/load", "/get_server_info"):
        assert [(await ask(client, path, key=key))[0] for key in (None, TENANT, ADMIN)] == [401, 403, 200]
    assert [(await ask(client, "/get_model_info", key=key))[0] for key in (None, TENANT, ADMIN)] == [401, 200, 200]
