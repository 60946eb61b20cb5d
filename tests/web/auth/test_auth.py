"""Authentication: with keys every route is closed, each key acts for its tenant, and errors have the API's shape."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import pytest
import trio
from structlog.testing import capture_logs

from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.auth import OPEN_ROUTES, needs_admin
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.http.server import serve
from tests.openai_httpx import httpx
from tests.runtimes import BLOCK, small_runtime
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk
from tests.web.http.live import PATIENCE_S, UNHURRIED

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "x"}
A, B, ADMIN = "sk-of-a", "sk-of-b", "sk-of-admin"


def entry(key: str, tenant: str, *, admin: bool = False) -> KeyEntry:
    return KeyEntry(id=f"id-{tenant}", name=f"{tenant}'s", tenant=tenant, sha256=hash_key(key), admin=admin)


def store() -> KeyStore:
    return KeyStore([entry(A, "a"), entry(B, "b"), entry(ADMIN, "ops", admin=True)])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def closed_app(desk: FakeDesk | None = None) -> QuipuApp:
    return make_app(desk or FakeDesk(), None, store())


def routes(app: QuipuApp) -> Iterator[tuple[str, str, str]]:
    """Return (rule, method, path) for every route of the app."""
    for rule in app.url_map.iter_rules():
        path = re.sub(r"<[^>]*>", "x", rule.rule)
        for method in sorted(rule.methods or ()):
            yield rule.rule, method, path


async def ask(app: QuipuApp, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    async with Client(app).open(method, path, headers=headers) as exchange:
        return await exchange.wait_started()


async def test_every_route_requires_a_key() -> None:
    """Every route and method but the listed ones needs a key, including routes added later."""
    app = closed_app()

    @app.get("/forgotten/<path:name>")
    async def forgotten(name: str) -> str:
        return name

    rules = {rule for rule, _, _ in routes(app)}
    assert rules >= OPEN_ROUTES | {PATH, "/metrics", "/v1/models/<path:name>", "/forgotten/<path:name>"}
    for rule, method, path in routes(app):
        is_open = rule in ("/", "/health", "/ready", "/docs", "/openapi.json", "/ui", "/ui/", "/ui/static/<path:name>")
        for headers in ({}, bearer("sk-of-nobody")):
            status = await ask(app, method, path, headers)
            assert (status != 401) == is_open, (method, path, status)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("GET", "//"),
        ("GET", "/nothing"),
        ("POST", "/health"),  # a method that an open route does not support
        ("GET", "/health/"),
        ("GET", "/health/../metrics"),
        ("GET", "/HEALTH"),
        ("GET", "/v1/completions"),
    ],
)
async def test_401_precedes_404_and_405(method: str, path: str) -> None:
    """401 comes before 404, 405 and a redirect, and paths similar to open routes are not open."""
    app = closed_app()
    assert await ask(app, method, path) == 401
    assert await ask(app, method, path, bearer(A)) in (307, 404, 405)


async def test_admin_routes() -> None:
    """Routes about all tenants answer 403 to a tenant's key, whether they exist or not; an admin key opens all."""
    app = closed_app()
    admin_rules = {rule for rule, _, _ in routes(app) if needs_admin(rule)}
    assert admin_rules >= {"/metrics", "/server_info", "/reset_prefix_cache", "/v1/admin/engines"}
    for rule, method, path in routes(app):
        if rule in admin_rules:
            assert await ask(app, method, path, bearer(A)) == 403, (method, path)
        else:
            assert await ask(app, method, path, bearer(A)) not in (401, 403), (method, path)
        assert await ask(app, method, path, bearer(ADMIN)) not in (401, 403), (method, path)
    for path in ("/v1/organization", "/v1/organization/keys", "/v1/organizations/x/y"):
        assert await ask(app, "GET", path, bearer(A)) == 403, path
        assert await ask(app, "GET", path, bearer(ADMIN)) != 403, path
    assert await ask(app, "GET", "//metrics", bearer(A)) == 403  # the router treats it as /metrics
    assert await ask(app, "GET", "/v1/organizational", bearer(A)) == 404


async def test_refused_before_the_account() -> None:
    """No ticket is opened without a valid key, and a refused reset does nothing."""
    desk = FakeDesk()
    client = Client(closed_app(desk))
    exchange, _ = await client.post(PATH, BODY)
    assert exchange.status == 401
    exchange, _ = await client.post("/reset_prefix_cache", b"", bearer(A))
    assert exchange.status == 403
    assert desk.tickets == [] and desk.num_resets == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {A}"},
        {"Authorization": f"bEARER  {A} "},
        {"x-api-key": A},
        {"X-API-Key": f" {A}"},
        {"Authorization": f"Bearer {A}", "x-api-key": A},
        {"Authorization": "Basic dTpw", "x-api-key": A},
    ],
)
async def test_key_headers(headers: dict[str, str]) -> None:
    """Either header is accepted, and both if they agree."""
    desk = FakeDesk()
    exchange, _ = await Client(closed_app(desk)).post(PATH, BODY, headers)
    assert exchange.status == 200 and desk.ticket.encode.domain == "a"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": A},
        {"Authorization": f"Basic {A}"},
        {"Authorization": f"Bearer {A} {B}"},
        {"Authorization": f"Bearer {A}", "x-api-key": B},
        {"Authorization": f"Bearer {A}", "x-api-key": "sk-of-nobody"},
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {A}"},
        {"x-api-key": hash_key(A)},
        {"x-api-key": "\xff"},
    ],
)
async def test_invalid_key(headers: dict[str, str]) -> None:
    """An invalid key is a 401 in OpenAI's shape with WWW-Authenticate; the key is not echoed."""
    exchange, answer = await Client(closed_app()).post(PATH, BODY, headers)
    assert exchange.status == 401 and exchange.headers["www-authenticate"] == "Bearer"
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert "sk-" not in error["message"]


async def test_forbidden_shape() -> None:
    """A 403 says what is missing, and does not ask the client to authenticate again."""
    exchange, answer = await Client(closed_app()).get("/metrics", bearer(A))
    assert exchange.status == 403 and "www-authenticate" not in exchange.headers
    assert answer["error"]["code"] == "admin_key_required" and "admin" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/messages", {}), ("/v1/messages/count_tokens", {}), ("/v1/models", {"anthropic-version": "2023-06-01"})],
)
async def test_anthropic_shape(path: str, headers: dict[str, str]) -> None:
    """On Anthropic's paths errors have its shape, with the request's id; on shared paths a header decides."""
    exchange, answer = await Client(closed_app()).post(path, {}, headers)
    assert exchange.status == 401
    assert answer == {
        "type": "error",
        "error": {"type": "authentication_error", "message": answer["error"]["message"]},
        "request_id": exchange.headers["x-quipu-request-id"],
    }
    anthropic_version = {"anthropic-version": "2023-06-01", "x-api-key": A}
    _, answer = await Client(closed_app()).get("/v1/organizations/usage_report/messages", anthropic_version)
    assert answer["error"]["type"] == "permission_error"


async def test_without_keys() -> None:
    """Without keys everything is open, whatever key a client sends."""
    desk = FakeDesk()
    client = Client(make_app(desk))
    for headers in ({}, bearer("whatever"), {"Authorization": f"Bearer {A}", "x-api-key": B}):
        exchange, _ = await client.post(PATH, BODY, headers)
        assert exchange.status == 200
        assert (await client.get("/server_info", headers))[0].status == 200
    assert {ticket.encode.domain for ticket in desk.tickets} == {"default"}


async def test_admin_key_has_a_tenant() -> None:
    """An admin key may generate as well, as its own tenant."""
    desk = FakeDesk()
    exchange, _ = await Client(closed_app(desk)).post(PATH, BODY, bearer(ADMIN))
    assert exchange.status == 200 and desk.ticket.encode.domain == "ops"


async def test_server_info_counts_keys() -> None:
    """`/server_info` shows the number and source of keys, but no key, hash or tenant."""
    _, answer = await Client(closed_app()).get("/server_info", bearer(ADMIN))
    assert answer["keys"] == {"num_keys": 3, "num_admin_keys": 1, "key_file": None}
    text = json.dumps(answer)
    for key in (A, B, ADMIN):
        assert key not in text and hash_key(key) not in text


async def test_log_names_the_key() -> None:
    """The log line names the key's id and tenant; for a refused request the reason, and nothing of the key."""
    client = Client(closed_app())
    with capture_logs() as lines:
        await client.post(PATH, BODY, bearer(A))
        await client.post(PATH, BODY, bearer("sk-of-nobody"))
    served, refused = lines
    assert (served["tenant"], served["key_id"], served["outcome"]) == ("a", "id-a", "finished")
    assert (refused["status"], refused["error_code"], refused["outcome"]) == (401, "invalid_api_key", "rejected")
    assert "tenant" not in refused and "sk-" not in repr(lines) and hash_key(A) not in repr(lines)


async def test_openai_client() -> None:
    """OpenAI's client works with a key, and raises its usual exceptions without one."""
    transport = httpx.ASGITransport(app=closed_app())
    async with httpx.AsyncClient(transport=transport) as http:

        def client(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)

        assert (await client(A).completions.create(model="tiny", prompt="x")).choices[0].text == "Hello"
        with pytest.raises(openai.AuthenticationError) as refused:
            await client("sk-of-nobody").completions.create(model="tiny", prompt="x")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError):
            await client(A).get("/organization/usage/completions", cast_to=object)


async def test_tenants_never_share(autojump_clock: trio.testing.MockClock) -> None:
    """One tenant's prompt is a hit for itself and a miss for the other, with and without the same salt."""
    async with small_runtime() as runtime:
        client = Client(make_app(runtime.runtime.desk, None, store()))
        prompt = list(range(300, 300 + 4 * BLOCK))

        async def cached(key: str, **fields: Any) -> int:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **fields}
            exchange, answer = await client.post(PATH, body, bearer(key))
            assert exchange.status == 200, answer
            num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return num_cached

        for salt in ({}, {"cache_salt": "the same"}):
            assert await cached(A, **salt) == 0
            assert await cached(B, **salt) == 0
            assert await cached(ADMIN, n=2, **salt) == 0
            assert await cached(A, **salt) == await cached(B, **salt) == 3 * BLOCK


@asynccontextmanager
async def connection(app: QuipuApp) -> AsyncIterator[trio.SocketStream]:
    """Open a connection to the app on its real server."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(partial(serve, app, host="127.0.0.1", port=0, config=UNHURRIED))
            async with await trio.open_tcp_stream(address.host, address.port) as stream:
                yield stream
            nursery.cancel_scope.cancel()


async def read_head(stream: trio.SocketStream) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        data = await stream.receive_some()
        assert data, received
        received += data
    return received.lower()


@pytest.mark.parametrize("announced", [b"Content-Length: 60000000", b"Transfer-Encoding: chunked"])
async def test_body_of_unauthenticated_request_is_not_read(announced: bytes) -> None:
    """A request without a valid key is answered before its body arrives, and its connection closes."""
    async with connection(closed_app()) as stream:
        await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\n" + announced + b"\r\n\r\n")
        head = await read_head(stream)
        assert head.startswith(b"http/1.1 401") and b"connection: close" in head
        while await stream.receive_some():
            pass


async def test_repeated_key_headers() -> None:
    """A valid key in one of two headers does not excuse an invalid one in the other."""
    for first, second in ((A, B), (A, "sk-of-nobody"), ("sk-of-nobody", A)):
        async with connection(closed_app()) as stream:
            keys = f"Authorization: Bearer {first}\r\nAuthorization: Bearer {second}\r\n".encode()
            await stream.send_all(b"GET /v1/models HTTP/1.1\r\nHost: test\r\n" + keys + b"\r\n")
            assert (await read_head(stream)).startswith(b"http/1.1 401")


async def test_connection_survives_refusal_without_body() -> None:
    """If no body was announced, the next request on the connection is served."""
    async with connection(closed_app()) as stream:
        await stream.send_all(b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n")
        refused = await read_head(stream)
        assert refused.startswith(b"http/1.1 401") and b"connection: close" not in refused
        while not refused.endswith(b"}}"):
            refused += await stream.receive_some()
        await stream.send_all(f"GET /v1/models HTTP/1.1\r\nHost: test\r\nx-api-key: {A}\r\n\r\n".encode())
        assert (await read_head(stream)).startswith(b"http/1.1 200")
