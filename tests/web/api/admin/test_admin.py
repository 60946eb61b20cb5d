"""The routes for models, probes and metrics."""

from __future__ import annotations

import pytest
from openai.types import Model

from quipu.actors.messages.supervisor import DraftModelMemory, EngineReady
from quipu.actors.request_desk.health import EngineState, EngineStatus, State
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk


async def test_models() -> None:
    """`GET /v1/models` lists every served name with the fields that clients rely on."""
    client = Client(make_app(FakeDesk()))
    exchange, answer = await client.get("/v1/models")
    assert exchange.status == 200 and answer["object"] == "list"
    assert [entry["id"] for entry in answer["data"]] == ["org/tiny", "tiny"]
    for entry in answer["data"]:
        Model.model_validate(entry)
        assert (entry["root"], entry["owned_by"]) == ("org/tiny", "quipu")
        assert (entry["max_model_len"], entry["block_size"], entry["created"]) == (64, 16, INFO.created)
        assert (await client.get(f"/v1/models/{entry['id']}"))[1] == entry


async def test_unknown_model() -> None:
    """An unknown model is a 404 in the shape of the API."""
    exchange, answer = await Client(make_app(FakeDesk())).get("/v1/models/huge")
    assert exchange.status == 404 and answer["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        (State.STARTING, 200, 503),
        (State.READY, 200, 200),
        (State.RESTARTING, 503, 503),
        (State.DRAINING, 200, 503),
        (State.FAILED, 503, 503),
    ],
)
async def test_probes(state: State, health: int, ready: int) -> None:
    """Health and readiness come from the supervisor; a 503 has Retry-After."""
    client = Client(make_app(FakeDesk(state=state)))
    for path, status in (("/health", health), ("/ready", ready), ("/ping", health)):
        exchange, answer = await client.get(path)
        assert exchange.status == status, path
        assert answer["state"] == state and answer["incarnation"] == 1
        assert ("retry-after" in exchange.headers) == (status == 503)


async def test_metrics() -> None:
    """The metrics text is sent unchanged, with the content type that scrapers expect."""
    async with Client(make_app(FakeDesk())).open("GET", "/metrics") as exchange:
        assert await exchange.wait_started() == 200
        assert exchange.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await exchange.read() == FakeDesk().render_metrics()


async def test_server_info() -> None:
    """`/server_info` shows the models, the settings and the incarnation."""
    _, answer = await Client(make_app(FakeDesk())).get("/server_info")
    assert answer["model"] == "org/tiny" and answer["state"] == "ready" and answer["incarnation"] == 1
    assert answer["kv_cache"] == {"num_blocks": 128, "block_size": 16}
    assert answer["settings"] == {"dtype": "float32"}
    assert answer["version"] == (await Client(make_app(FakeDesk())).get("/version"))[1]["version"]


async def test_memory_of_a_draft_model() -> None:
    """What a draft model takes of an engine's memory is beside what the model takes; null without one."""
    alone = EngineReady(1, 101, 16, "cpu", "bfloat16", weights_bytes=700, kv_cache_bytes=900)
    both = EngineReady(1, 101, 16, "cpu", "bfloat16", draft_model=DraftModelMemory(70, 90), weights_bytes=700)
    engines = [EngineStatus(at, 1, EngineState.READY, "", ready) for at, ready in enumerate((alone, both))]
    _, answer = await Client(make_app(FakeDesk(engine_list=engines))).get("/server_info")
    shown = [engine["engine"] for engine in answer["engines"]]
    assert [engine["draft_model"] for engine in shown] == [None, {"weights_bytes": 70, "kv_cache_bytes": 90}]
    assert [engine["weights_bytes"] for engine in shown] == [700, 700]
    assert answer["engine"] == shown[0]
