"""A client's identifier is a hint for the router, the same on every API, and never shared between tenants."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.web.api.generation import MAX_AFFINITY_CHARS, affinity_of
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

MESSAGES = [{"role": "user", "content": "x"}]
OPENAI: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
}
ANTHROPIC: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5}
KEYS = KeyStore([KeyEntry(id=t, name=t, tenant=t, sha256=hash_key(f"sk-{t}")) for t in ("a", "ab", "b")])


async def affinity(path: str, *, tenant: str = "a", **fields: Any) -> bytes:
    desk = FakeDesk()
    body = {"model": "tiny", **OPENAI.get(path, ANTHROPIC), **fields}
    exchange, answer = await Client(make_app(desk, None, KEYS)).post(path, body, {"x-api-key": f"sk-{tenant}"})
    assert exchange.status == 200, answer
    assert "x-quipu-ignored-fields" not in exchange.headers
    assert desk.ticket.encode.cache_salt == ""
    return desk.ticket.encode.affinity


async def test_same_on_every_api() -> None:
    """An identifier stands for the same client on all endpoints, and for another one in another tenant."""
    seen = {await affinity(path, prompt_cache_key="knot") for path in OPENAI}
    seen |= {await affinity(path, user="knot") for path in OPENAI}
    seen.add(await affinity("/v1/messages", metadata={"user_id": "knot"}))
    (one,) = seen
    assert len(one) == 16
    assert one != await affinity("/v1/completions", user="cord")
    assert one != await affinity("/v1/completions", user="knot", tenant="b")


@pytest.mark.parametrize("path", OPENAI)
async def test_cache_key_precedes_user(path: str) -> None:
    """`prompt_cache_key` counts before `user`, unless it is empty."""
    key, user = await affinity(path, prompt_cache_key="key"), await affinity(path, user="user")
    assert key != user
    assert await affinity(path, prompt_cache_key="key", user="user") == key
    assert await affinity(path, prompt_cache_key="", user="user") == user
    assert await affinity(path, prompt_cache_key=None, user="user") == user


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in OPENAI for fields in ({}, {"prompt_cache_key": ""}, {"user": None})),
        ("/v1/responses", {"safety_identifier": "x"}),
        ("/v1/messages", {}),
        ("/v1/messages", {"metadata": {}}),
        ("/v1/messages", {"metadata": {"user_id": ""}}),
    ],
)
async def test_nobody(path: str, fields: dict[str, Any]) -> None:
    """Without an identifier a request has no affinity; `safety_identifier` does not count as one."""
    assert await affinity(path, **fields) == b""


@pytest.mark.parametrize("name", ["prompt_cache_key", "user"])
@pytest.mark.parametrize("path", OPENAI)
async def test_wrong_type(path: str, name: str) -> None:
    """A value that is not a string is a 400 that names the field, even of a field that would not count."""
    desk = FakeDesk()
    for value in (1, ["x"], {"x": 1}, True):
        body = {"model": "tiny", **OPENAI[path], "prompt_cache_key": "x", name: value}
        exchange, answer = await Client(make_app(desk)).post(path, body)
        assert (exchange.status, answer["error"]["param"], answer["error"]["code"]) == (400, name, "invalid_type")
    assert not desk.tickets


def test_tenants_never_meet() -> None:
    """Different pairs of tenant and identifier have different digests, wherever one ends and the other begins."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", "x"), ("a", "1:b"), ("1:a", "b"), ("a", "x"), ("", "a"), ("a", "a")]
    assert len({affinity_of(*pair) for pair in pairs}) == len(pairs)
    assert affinity_of("a", "") == b""


async def test_long_values() -> None:
    """Only the beginning of a long identifier counts, and its request is served like any other."""
    long = "é" * MAX_AFFINITY_CHARS
    assert await affinity("/v1/completions", user=long) == await affinity("/v1/completions", user=long + "x" * 100_000)
    assert await affinity("/v1/completions", user=long) != await affinity("/v1/completions", user=long[:-1])
