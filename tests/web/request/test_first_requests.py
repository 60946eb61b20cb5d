"""Responses to clients that know only the server's address, or a nearly correct URL: they name the right one."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urljoin

import pytest

from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from quipu.web.request.errors import no_model
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import FakeDesk

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = KeyStore([KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-1"))])


async def ask(client: Client, method: str, path: str) -> tuple[Exchange, Any]:
    async with client.open(method, path) as exchange:
        return exchange, await exchange.json()


@pytest.mark.parametrize("keys", [KeyStore(), KEYS])
async def test_root(keys: KeyStore) -> None:
    """A browser is sent to the pages, with and without keys; other clients get URLs, which say the same to all."""
    client = Client(make_app(FakeDesk(), keys=keys))
    async with client.open("GET", "/", headers=BROWSER) as exchange:
        await exchange.wait_started()
    assert (exchange.status, exchange.headers["location"]) == (307, "ui/")
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "text/html;q=0, */*"}, {"Accept": ",;q=x/\t"}):
        async with client.open("GET", "/", headers=accept) as exchange:
            answer = await exchange.json()
        assert exchange.status == 200 and answer["urls"]["ui"] == "/ui", accept
        assert exchange.headers["vary"] == "Accept"


async def test_root_without_pages() -> None:
    """A browser is told why there is no page, and other clients are not sent to one."""
    client = Client(make_app(FakeDesk(), AppOptions(serves_ui=False)))
    async with client.open("GET", "/", headers=BROWSER) as exchange:
        await exchange.wait_started()
        assert b"--no-ui" in await exchange.read()
    assert exchange.status == 200
    async with client.open("GET", "/") as exchange:
        assert "ui" not in (await exchange.json())["urls"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("GET", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "//v1//chat/completions", "POST /v1/chat/completions"),
        ("POST", "/V1/Chat/Completions", "POST /v1/chat/completions"),
        ("POST", "/api/v1/completions", "POST /v1/completions"),
        ("POST", "/messages", "POST /v1/messages"),
        ("POST", "/responses", "POST /v1/responses"),
        ("GET", "/models", "GET /v1/models"),
        ("GET", "/models/tiny", "GET /v1/models/tiny"),
        ("GET", "/v1/health", "GET /health"),
        ("GET", "/v1/metrics/", "GET /metrics"),
    ],
)
async def test_nearly_right_urls(method: str, path: str, meant: str) -> None:
    """If a known path is spelled differently, or has a wrong prefix or none, the 404 names the right one."""
    exchange, answer = await ask(Client(make_app(FakeDesk())), method, path)
    assert exchange.status == 404 and answer["error"]["code"] == "unknown_url"
    assert answer["error"]["message"].endswith(f" Use {meant} instead.")


@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("GET", "/v1/models/?limit=1&after_id=a%20b", "/v1/models?limit=1&after_id=a%20b"),
        ("HEAD", "/v1/models/", "/v1/models"),
        ("GET", "/v1/chat/completions/a%2Fb/", "/v1/chat/completions/a%2Fb"),
        ("DELETE", "/v1/models/", None),
        ("GET", "/v1/models//", None),
        ("GET", "/v1/models%2F", None),
        ("GET", "/v1/nothing/", None),
        ("GET", "/" + "x" * 3000 + "/", None),
    ],
)
async def test_slash_too_much(method: str, path: str, location: str | None) -> None:
    """A route's path with a slash at its end is sent on to it with method and body, also behind a proxy that removes a
    prefix; nothing else is."""
    async with Client(make_app(FakeDesk())).open(method, path) as exchange:
        await exchange.wait_started()
    if location is None:
        assert exchange.status == 404 and "location" not in exchange.headers
    else:
        assert exchange.status == 307
        assert urljoin(f"http://proxy/prefix{path}", exchange.headers["location"]) == f"http://proxy/prefix{location}"


async def test_slash_too_much_needs_a_key() -> None:
    """A client without a key is sent nowhere."""
    exchange, _ = await ask(Client(make_app(FakeDesk(), keys=KEYS)), "GET", "/v1/models/")
    assert exchange.status == 401 and "location" not in exchange.headers


async def test_vllms_batches_of_chats() -> None:
    """vLLM's endpoint for several chats in one request is named, and what there is in its place."""
    exchange, answer = await ask(Client(make_app(FakeDesk())), "POST", "/v1/chat/completions/batch")
    assert exchange.status == 404 and answer["error"]["code"] == "unknown_url"
    assert "/v1/batches" in answer["error"]["message"]


async def test_head_has_no_body() -> None:
    """A HEAD has the headers of its GET, and nothing else."""
    client = Client(make_app(FakeDesk()))
    async with client.open("GET", "/v1/models") as got, client.open("HEAD", "/v1/models") as asked:
        assert await got.wait_started() == await asked.wait_started() == 200
        body = await got.read()
        assert await asked.read() == b""
    assert asked.headers["content-length"] == got.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing/chat/completions", "/" + "x/" * 2000])
async def test_unknown_urls(path: str) -> None:
    """A path that resembles no route gets no hint."""
    exchange, answer = await ask(Client(make_app(FakeDesk())), "GET", path)
    assert exchange.status == 404 and "instead" not in answer["error"]["message"]


async def test_hints_need_a_key() -> None:
    """A client without a key is told of no route."""
    exchange, answer = await ask(Client(make_app(FakeDesk(), keys=KEYS)), "POST", "/chat/completions")
    assert exchange.status == 401 and "/v1" not in answer["error"]["message"]


async def test_wrong_method() -> None:
    """The 405 names the supported method."""
    exchange, answer = await ask(Client(make_app(FakeDesk())), "GET", "/v1/chat/completions")
    assert exchange.status == 405 and answer["error"]["message"].endswith("Use POST.")


async def test_unknown_model() -> None:
    """The 404 names what is served, on every API."""
    client = Client(make_app(FakeDesk()))
    for path, body in (
        ("/v1/chat/completions", {"model": "gpt-5", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"model": "gpt-5", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    ):
        exchange, answer = await client.post(path, json.dumps(body).encode())
        assert exchange.status == 404 and 'Served here: "org/tiny", "tiny".' in answer["error"]["message"]


def test_many_models() -> None:
    """A long list is cut."""
    message = no_model("x", [f"m{n}" for n in range(100)]).message
    assert message.endswith('"m7" and 92 more (GET /v1/models).') and '"m8"' not in message


async def test_too_large_body() -> None:
    """The 413 says the limit and its flag; a page of an allowed origin may read it (test_browsers.py)."""
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=1234))
    exchange, answer = await Client(app).post("/v1/completions", b" " * 2000)
    assert exchange.status == 413
    assert "1,234 bytes" in answer["error"]["message"] and "--max-body-bytes" in answer["error"]["message"]
