"""`GET /v1/cache/stats`: its shape, who is shown what, and parameters."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.cache_insight.cache_watch import CacheWatch, WatchedPrompt
from quipu.actors.request_desk.health import EngineState, EngineStatus
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

PATH = "/v1/cache/stats"
KEYS = {"acme": "sk-of-acme", "b": "sk-of-b", "ops": "sk-of-ops"}


def keys_of(tenant: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{tenant} {number}".encode()).digest() for number in range(count)]


def watch_of(*tenants: str) -> CacheWatch:
    """Return a watch to which each tenant has sent a prompt of four blocks twice."""
    watch = CacheWatch(3600.0, 16, clock=lambda: 100.0, unix_time=lambda: 1_700_000_100.0)
    for tenant in tenants:
        watch.on_prompt(WatchedPrompt(tenant, "demo", 65, 0, keys_of(tenant, 4)), 50.0)
        watch.on_prompt(WatchedPrompt(tenant, "demo", 65, 48, keys_of(tenant, 4), is_first_hit=True), 60.0)
    return watch


def client_of(watch: CacheWatch, *, with_keys: bool = True) -> Client:
    entries = [
        KeyEntry(id=f"id-{tenant}", name=tenant, tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
        for tenant, key in KEYS.items()
    ]
    desk = FakeDesk(cache=watch)
    desk.engine_list = [EngineStatus(i, 1, EngineState.READY, blocks_used=3, blocks_total=63) for i in range(2)]
    return Client(make_app(desk, None, KeyStore(entries) if with_keys else None))


async def get(client: Client, of: str | None = None, /, **parameters: object) -> tuple[int, Any]:
    headers = {} if of is None else {"x-api-key": KEYS[of]}
    exchange, answer = await client.get(f"{PATH}?{urlencode(parameters)}", headers)
    return exchange.status, answer


async def test_figures_of_a_tenant() -> None:
    """A tenant's key is shown its own figures and nothing of the others."""
    status, shown = await get(client_of(watch_of("acme", "b")), "acme")
    assert status == 200
    assert {name: shown[name] for name in ("object", "window_s", "block_size", "has_more")} == {
        "object": "cache.stats",
        "window_s": 3600.0,
        "block_size": 16,
        "has_more": False,
    }
    assert shown["data"] == [
        {
            "tenant": "acme",
            "model": "demo",
            "parent": None,
            "requests": 2,
            "hit_requests": 1,
            "prompt_tokens": 130,
            "cached_tokens": 48,
            "hit_rate": 0.3692,
            "series": [
                {
                    "start": 1_700_000_000.0,
                    "end": 1_700_000_100.0,
                    "requests": 2,
                    "prompt_tokens": 130,
                    "cached_tokens": 48,
                    "hit_rate": 0.3692,
                }
            ],
            "infinite_cache": {
                "query_blocks": 8,
                "hit_blocks": 4,
                "hit_rate": 0.4923,
                "blocks_for_hits": {"0.5": 2, "0.9": 4, "0.99": 4},
                "sampled_share": 1.0,
            },
            "evictions": None,
            "pins": {"prompts": 0, "tokens": 0},
        }
    ]
    assert not {"all", "blocks", "pinned"} & shown.keys() and "b" not in [row["tenant"] for row in shown["data"]]


async def test_figures_of_all() -> None:
    """An admin key, or anybody on this machine where there are no keys, is shown every tenant and the sums."""
    for client, tenant in (
        (client_of(watch_of("acme", "b")), "ops"),
        (client_of(watch_of("acme", "b"), with_keys=False), None),
    ):
        status, shown = await get(client, tenant)
        assert status == 200
        assert [row["tenant"] for row in shown["data"]] == ["b", "acme"]
        assert (shown["all"]["requests"], shown["all"]["cached_tokens"]) == (4, 96)
        assert shown["all"]["infinite_cache"]["hit_blocks"] == 8
        assert shown["blocks"] == {"total": 126, "used": 6}
        assert shown["pinned"] == {"blocks": 0, "yielded": 0}


async def test_filters() -> None:
    """`tenant`, `model` and `limit` choose among the rows; a tenant's key finds nothing of another tenant."""
    client = client_of(watch_of("acme", "b"))
    assert [row["tenant"] for row in (await get(client, "ops", tenant="acme"))[1]["data"]] == ["acme"]
    assert (await get(client, "ops", model="other"))[1]["data"] == []
    first = (await get(client, "ops", limit=1))[1]
    assert [row["tenant"] for row in first["data"]] == ["b"] and first["has_more"] is True
    assert [row["tenant"] for row in (await get(client, "b", tenant="b"))[1]["data"]] == ["b"]
    assert (await get(client, "b", tenant="acme")) == (await get(client, "b", tenant="nobody"))
    assert (await get(client, "b", tenant="acme"))[1]["data"] == []


async def test_what_a_tenant_reads_is_its_own() -> None:
    """The whole answer to one tenant is the same whether or not another has sent anything."""
    assert await get(client_of(watch_of("b")), "b") == await get(client_of(watch_of("b", "acme", "c")), "b")


async def test_key_is_needed() -> None:
    """Without a valid key there is no answer."""
    assert (await get(client_of(watch_of())))[0] == 401


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1025", "limit"), ("limit=x", "limit"), ("tenant=a&tenant=b", "tenant")],
)
async def test_bad_parameters(query: str, param: str) -> None:
    """A parameter that cannot be understood is named in the error."""
    exchange, answer = await client_of(watch_of("b")).get(f"{PATH}?{query}", {"x-api-key": KEYS["ops"]})
    assert exchange.status == 400 and answer["error"]["param"] == param


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tenant", "model", "limit", "limit[]", "tenant[0]", "x"]),
            st.one_of(st.text(max_size=20), st.integers(-5, 2000).map(str), st.just("acme")),
        ),
        max_size=4,
    )
)
async def test_random_queries(pairs: list[tuple[str, str]]) -> None:
    """Whatever is asked, the answer is a report or an error that names the parameter."""
    query = urlencode(pairs, errors="surrogatepass")
    exchange, answer = await client_of(watch_of("acme")).get(f"{PATH}?{query}", {"x-api-key": KEYS["ops"]})
    assert exchange.status in (200, 400)
    if exchange.status == 400:
        assert answer["error"]["param"] in ("tenant", "model", "limit")
    else:
        assert answer["object"] == "cache.stats"
