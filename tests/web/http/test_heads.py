"""Decisions made from a request's head alone, over a real socket: whether its body may be sent, and what its path
matches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.options import AppOptions
from tests.web.fakes import FakeDesk
from tests.web.http.live import Running, get, post, running_ours

# The stock server leaves a memory channel unclosed for each request.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

BODY = json.dumps({"model": "tiny", "prompt": "x"}).encode()
KEY = "Authorization: Bearer sk-right"
EXPECT = "Expect: 100-continue"


@asynccontextmanager
async def serving(*, with_keys: bool = False) -> AsyncIterator[Running]:
    entries = [KeyEntry(id="k", name="k", tenant="t", sha256=hash_key("sk-right"))] if with_keys else []
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=1000), KeyStore(entries))
    async with running_ours(app) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "num_bytes", "status"),
    [(["Authorization: Bearer sk-wrong"], 10, 401), ([], 10, 401), ([KEY], 1001, 413)],
)
async def test_refused_without_body(path: str, fields: list[str], num_bytes: int, status: int) -> None:
    """A client that waits for `100 Continue` without a key, or with too large a body, is refused at once."""
    async with serving(with_keys=True) as server:
        client = await server.connect()
        request = post(path, bytes(num_bytes), EXPECT, *fields)
        await client.send(request[:-num_bytes])
        assert (await client.answer()).status == status
        assert await client.read_all() == b""


async def test_100_continue() -> None:
    """`100 Continue` is sent when the handler reads the body, unless the body is already arriving."""
    async with serving(with_keys=True) as server:
        client = await server.connect()
        request = post("/v1/completions", BODY, EXPECT, KEY)
        await client.send(request[: -len(BODY)])
        assert (await client.answer()).status == 100
        await client.send(BODY)
        assert (await client.answer()).status == 200
        await client.send(request)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/metrics", 200),
        ("/metrics?a=%6d", 200),
        ("//metrics", 404),
        ("///metrics", 404),
        ("/%6detrics", 404),
        ("/metrics/", 307),
        ("/%2Fmetrics", 404),
        ("/v1/models", 200),
        ("/v1//models", 404),
        ("//v1/models", 404),
        ("/v1%2Fmodels", 404),
        ("/v1/models/tiny", 200),
        ("/v1/models/t%69ny", 200),
        ("/v1/models/org/tiny", 200),
        ("/v1/models/org%2Ftiny", 200),
        ("/v1/models//tiny", 404),
        ("/v1/%6dodels/tiny", 404),
        ("http://x/v1/models", 200),
        ("http://x//v1/models", 404),
    ],
)
async def test_paths_are_matched_as_sent(path: str, status: int) -> None:
    """Only the variable parts of a route may be percent-encoded."""
    async with serving() as server:
        client = await server.connect()
        await client.send(get(path))
        assert (await client.answer()).status == status


@pytest.mark.parametrize("host", ["", "a b", "a..b", "x" * 70, "[::1", "a/b", "\xe9", "localhost:99999"])
async def test_odd_hosts(host: str) -> None:
    """`Host` does not affect routing, so no value of it is a server error."""
    async with serving() as server:
        client = await server.connect()
        await client.send(get("/v1/models").replace(b"Host: x", b"Host: " + host.encode("latin1")))
        assert (await client.answer()).status == 200


async def test_unknown_url_has_no_methods() -> None:
    """A path in another spelling is a 404, not a 405."""
    async with serving() as server:
        client = await server.connect()
        await client.send(post("//metrics"))
        assert (await client.answer()).status == 404
