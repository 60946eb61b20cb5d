"""`GET /v1/cache/tree`: its shape, who is shown what, parameters and bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.cache_insight.cache_figures import HeldBlocks, TreeNode
from quipu.actors.cache_insight.cache_watch import CacheWatch, WatchedPrompt
from quipu.actors.cache_insight.prefix_tree import Passage
from quipu.web.api.cache.cache_schemas import MAX_NODES
from quipu.web.api.cache.tree import MAX_BYTES, NODES_AT_A_TIME
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.step_reports import report
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

PATH = "/v1/cache/tree"
KEYS = {"acme": "sk-of-acme", "b": "sk-of-b", "ops": "sk-of-ops"}
UNIX_S = 1_700_000_000.0


class Cache:
    """A watch, and which blocks its engines hold: all, but for those that a test evicts."""

    def __init__(self, num_engines: int = 1) -> None:
        self.evicted: set[bytes] = set()
        self.lowered: set[bytes] = set()
        """Blocks that lie on the host alone, or in another tier."""
        self.lower_tier = "host"
        self.watch = CacheWatch(3600.0, 16, clock=lambda: 100.0, unix_time=lambda: UNIX_S)
        self.watch.held_by = lambda keys: (
            dict.fromkeys(range(num_engines), held) if (held := self._held(keys)).num else {}
        )
        self._num_sequences = 0
        self._now = 40.0

    def _held(self, keys: Sequence[bytes]) -> HeldBlocks:
        num = next((i for i, key in enumerate(keys) if key in self.evicted), len(keys))
        lowered = len(self.lowered.intersection(keys[:num]))
        return HeldBlocks(num, {self.lower_tier: lowered} if lowered else {})

    def prompt(
        self, tenant: str, *numbers: int, ends: bool = True, advances: bool = True, named: str = "", **fields: Any
    ) -> list[bytes]:
        """Send a prompt of these blocks in a request of this name; return its keys."""
        key = tenant.encode()
        keys = [key := hashlib.sha256(key + b"%d" % number).digest() for number in numbers]
        self._num_sequences += 1
        ids = (self._num_sequences,)
        self.watch.on_prompt(
            WatchedPrompt(
                tenant, "demo", 16 * len(keys) + 1, 0, keys, sequence_ids=ids, passage=Passage(named), **fields
            ),
            self._now,
        )
        if ends:
            self.watch.on_end(ids, self._now + 5)
        if advances:
            self._now += 10
        return keys

    def client(self) -> Client:
        entries = [
            KeyEntry(id=f"id-{tenant}", name=tenant, tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
            for tenant, key in KEYS.items()
        ]
        return Client(make_app(FakeDesk(cache=self.watch), None, KeyStore(entries)))


async def get(client: Client, of: str, /, **parameters: object) -> tuple[int, Any]:
    exchange, answer = await client.get(f"{PATH}?{urlencode(parameters)}", {"x-api-key": KEYS[of]})
    return exchange.status, answer


def shape(answer: Any) -> list[tuple[int, int]]:
    return [(node["start"], node["tokens"]) for node in answer["nodes"]]


async def test_branches() -> None:
    """A node has its place, tokens, requests, times and engines, and a parent that came before it."""
    cache = Cache(num_engines=2)
    first = cache.prompt("acme", 1, 2, 3)
    second = cache.prompt("acme", 1, 2, 9, 9, ends=False)
    status, shown = await get(cache.client(), "acme")
    assert status == 200 and shown["object"] == "cache.tree" and shown["block_size"] == 16
    assert shown["has_more"] is False
    top, *below = shown["nodes"]
    assert top == {
        "id": first[0][:8].hex(),
        "parent": None,
        "tenant": "acme",
        "start": 0,
        "tokens": 32,
        "cached_tokens": 32,
        "cached_tokens_by_tier": {"device": 32, "host": 0, "disk": 0, "remote": 0},
        "engines": {"0": 32, "1": 32},
        "tier": "device",
        "requests": 2,
        "children": 2,
        "created_at": UNIX_S - 60,
        "last_used_at": UNIX_S - 50,
        "pinned_until": None,
        "in_use": True,
        "last_request": None,
        "diverged": None,
        "path_tokens": 0,
    }
    assert {node["parent"] for node in below} == {top["id"]}
    ids = [keys[2][:8].hex() for keys in (first, second)]
    assert {node["id"]: node["in_use"] for node in below} == {ids[0]: False, ids[1]: True}
    assert shown["eviction_order"] == ids[:1]


async def test_tiers() -> None:
    """A branch shows how much of it is on the host alone, and where most of it is."""
    cache = Cache()
    keys = cache.prompt("acme", 1, 2, 3, 4)
    tiers = []
    for lowered in ([], keys[3:], keys[1:], keys):
        cache.lowered = set(lowered)
        _, shown = await get(cache.client(), "acme")
        (node,) = shown["nodes"]
        assert node["cached_tokens"] == node["engines"]["0"] == 64
        tiers.append((node["tier"], node["cached_tokens_by_tier"]["device"], node["cached_tokens_by_tier"]["host"]))
    assert tiers == [("device", 64, 0), ("device", 48, 16), ("host", 16, 48), ("host", 0, 64)]


async def test_object_store() -> None:
    """A branch that is in the object store alone is shown as cached there, and is not the next to be evicted."""
    cache = Cache(2)
    cache.lower_tier = "remote"
    keys = cache.prompt("acme", 1, 2, 3, 4)
    for num_own, order in ((4, True), (1, True), (0, False)):
        cache.lowered = set(keys[num_own:])
        _, shown = await get(cache.client(), "acme")
        (node,) = shown["nodes"]
        assert node["cached_tokens"] == node["engines"]["1"] == 64
        assert node["cached_tokens_by_tier"]["remote"] == 64 - 16 * num_own
        assert node["tier"] == ("device" if num_own == 4 else "remote")
        assert shown["eviction_order"] == ([node["id"]] if order else [])


async def test_what_is_evicted_is_not_shown() -> None:
    """Branches that no engine holds are left out; others show their cached part."""
    cache = Cache()
    first, second = cache.prompt("acme", 1, 2, 3, 4), cache.prompt("acme", 1, 7, 8)
    cache.evicted |= {first[2], second[1]}
    _, shown = await get(cache.client(), "acme")
    assert [(node["start"], node["tokens"], node["cached_tokens"]) for node in shown["nodes"]] == [
        (0, 16, 16),
        (16, 48, 16),
    ]


async def test_order_of_eviction() -> None:
    """Branches that were released first are evicted first, the end of a prompt before its beginning."""
    cache = Cache()
    for numbers in ((1, 2), (5,), (1, 3)):
        cache.prompt("acme", *numbers)
    _, shown = await get(cache.client(), "acme")
    nodes = {node["id"]: node for node in shown["nodes"]}
    assert [(nodes[i]["start"], nodes[i]["requests"]) for i in shown["eviction_order"]] == [
        (16, 1),
        (0, 1),
        (16, 1),
        (0, 2),
    ]


async def test_tenants() -> None:
    """A tenant's key is shown its own branches, an admin key all; another tenant's branch is unknown to it."""
    cache = Cache()
    ours, theirs = cache.prompt("acme", 1, 2), cache.prompt("b", 1, 2)
    cache.prompt("acme", 1)
    cache.prompt("b", 1)
    client = cache.client()
    assert {node["tenant"] for node in (await get(client, "acme"))[1]["nodes"]} == {"acme"}
    assert {node["tenant"] for node in (await get(client, "ops"))[1]["nodes"]} == {"acme", "b"}
    assert {node["tenant"] for node in (await get(client, "ops", tenant="b"))[1]["nodes"]} == {"b"}
    assert (await get(client, "acme", tenant="b"))[1] == (await get(client, "acme", tenant="nobody"))[1]
    assert (await get(client, "acme", tenant="b"))[1]["nodes"] == []
    status, below = await get(client, "acme", **{"from": ours[0][:8].hex()})
    assert status == 200 and shape(below) == [(16, 16)]
    other = await get(client, "acme", **{"from": theirs[0][:8].hex()})
    unknown = await get(client, "acme", **{"from": "00" * 8})
    assert other == unknown and other[0] == 404 and other[1]["error"]["code"] == "branch_not_found"
    assert (await get(client, "acme", tenant="b", **{"from": ours[0][:8].hex()}))[0] == 404
    assert (await get(client, "ops", **{"from": theirs[0][:8].hex()}))[0] == 200


async def test_path_of_a_request() -> None:
    """The branches of a request come first, whatever `depth` says and also if evicted, with its tokens in each."""
    cache = Cache()
    cache.prompt("acme", 1, 2, 3, 4, named="first")
    keys = cache.prompt("acme", 1, 2, 3, named="short")
    other = cache.prompt("acme", 1, 8)
    cache.prompt("acme", 9)
    cache.evicted.add(keys[1])
    client = cache.client()
    status, shown = await get(client, "acme", request="short", depth=1)
    assert status == 200
    assert [(node["start"], node["tokens"], node["path_tokens"], node["cached_tokens"]) for node in shown["nodes"]] == [
        (0, 16, 16, 16),
        (16, 32, 32, 0),
        (0, 16, 0, 16),
    ]
    assert keys[1][:8].hex() not in shown["eviction_order"]
    below = (await get(client, "acme", request="short", **{"from": keys[0][:8].hex()}))[1]["nodes"]
    assert [(node["id"], node["path_tokens"]) for node in below] == [(keys[1][:8].hex(), 32), (other[1][:8].hex(), 0)]
    aside = (await get(client, "acme", request="short", **{"from": other[1][:8].hex()}))[1]
    assert aside["nodes"] == []
    whole = (await get(client, "acme", request="first"))[1]["nodes"]
    assert sum(node["path_tokens"] for node in whole) == 64 and len({node["id"] for node in whole}) == len(whole)
    assert [node["last_request"] for node in shown["nodes"]] == [None, "short", None], "the last had no name"


async def test_paths_of_several_prompts_are_bounded() -> None:
    """A branch that several prompts of a request share is listed once; at most `limit` branches are listed."""
    cache = Cache()
    for number in range(6):
        cache.prompt("acme", 1, number, named="many")
    _, shown = await get(cache.client(), "acme", request="many")
    assert [node["path_tokens"] for node in shown["nodes"]] == [16] * 7 and shown["has_more"] is False
    _, shown = await get(cache.client(), "acme", request="many", limit=3)
    assert len(shown["nodes"]) == 3 and shown["has_more"] is True


async def test_requests_of_others_are_unknown() -> None:
    """Another tenant's request gives the same 404 as one that does not exist; an admin may see it."""
    cache = Cache()
    cache.prompt("b", 1, named="theirs")
    client = cache.client()
    theirs, unknown = (await get(client, "acme", request="theirs")), (await get(client, "acme", request="nothing"))
    assert theirs == unknown and theirs[0] == 404 and theirs[1]["error"]["code"] == "request_not_found"
    assert (await get(client, "ops", request="theirs"))[1]["nodes"][0]["path_tokens"] == 16
    assert (await get(client, "ops", request="theirs", tenant="acme"))[0] == 404


async def test_what_a_tenant_reads_is_its_own() -> None:
    """The answer to one tenant is the same whether or not another has sent anything."""
    alone, beside = Cache(), Cache()
    for number in range(5):
        for cache in (alone, beside):
            cache.prompt("b", 1, number)
        beside.prompt("acme", 1, number, advances=False)
    assert (await get(alone.client(), "b")) == (await get(beside.client(), "b"))


async def test_depth_and_limit() -> None:
    """`depth` limits the levels and `limit` the nodes; upper ones and those of most requests come first."""
    cache = Cache()
    for number in range(5):
        cache.prompt("acme", *range(number + 1))
    cache.prompt("acme", 77)
    client = cache.client()
    assert shape((await get(client, "acme", depth=2))[1]) == [(0, 16), (0, 16), (16, 16)]
    assert len((await get(client, "acme", depth=1000))[1]["nodes"]) == 6
    _, first = await get(client, "acme", limit=1)
    assert shape(first) == [(0, 16)] and first["nodes"][0]["requests"] == 5 and first["has_more"] is True


async def test_pinned() -> None:
    """A pinned branch shows until when it is pinned, and has no place in the order of eviction."""
    cache = Cache()
    cache.prompt("acme", 1, 2, 3, ends=False, pin_ttl_s=300)
    cache.watch.on_report(report(pinned_ids=[1], pinned_ends=[32]), {1: ("acme", "demo")}, 40.0)
    cache.watch.on_end([1], 60.0)
    _, shown = await get(cache.client(), "acme")
    assert [(node["tokens"], node["pinned_until"]) for node in shown["nodes"]] == [(32, UNIX_S - 40 + 300), (16, None)]
    assert shown["eviction_order"] == [shown["nodes"][1]["id"]]


async def test_size_of_the_answer() -> None:
    """However many branches and engines there are, an answer has at most `MAX_NODES` nodes and `MAX_BYTES` bytes."""
    for num_engines, count in ((1, MAX_NODES), (200, None)):
        cache = Cache(num_engines)
        for number in range(MAX_NODES + 500):
            cache.prompt("acme", number)
        async with cache.client().open(
            "GET", f"{PATH}?limit={MAX_NODES}", headers={"x-api-key": KEYS["ops"]}
        ) as answer:
            await answer.wait_started()
            data = await answer.read()
        shown = orjson.loads(data)
        assert len(data) <= MAX_BYTES and shown["has_more"] is True
        assert len(shown["nodes"]) == count or (count is None and 100 < len(shown["nodes"]) < MAX_NODES)


async def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many clients ask, nodes for one of them are read between two iterations of the loop."""

    class Iterations(trio.abc.Instrument):
        num_nodes = most = 0

        def after_io_wait(self, timeout: float) -> None:
            self.most = max(self.most, self.num_nodes)
            self.num_nodes = 0

    cache, iterations = Cache(), Iterations()
    for number in range(3 * NODES_AT_A_TIME):
        cache.prompt("acme", number)
    whole = cache.watch.tree

    def counted(*args: Any) -> Iterator[TreeNode | None]:
        for node in whole(*args):
            iterations.num_nodes += 1
            yield node

    monkeypatch.setattr(cache.watch, "tree", counted)
    client = cache.client()
    trio.lowlevel.add_instrument(iterations)
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(get, client, "acme")
    trio.lowlevel.remove_instrument(iterations)
    assert iterations.most == NODES_AT_A_TIME


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=2001", "limit"),
        ("depth=0", "depth"),
        ("depth=x", "depth"),
        ("from=xyz", "from"),
        ("from=0&from=1", "from"),
        ("request=a&request=b", "request"),
    ],
)
async def test_bad_parameters(query: str, param: str) -> None:
    """A parameter that cannot be understood is named in the error."""
    exchange, answer = await Cache().client().get(f"{PATH}?{query}", {"x-api-key": KEYS["ops"]})
    assert exchange.status == 400 and answer["error"]["param"] == param


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tenant", "from", "depth", "limit", "request", "depth[]", "x"]),
            st.one_of(st.text(max_size=20), st.integers(-5, 2500).map(str), st.sampled_from(["acme", "ab" * 8, "req"])),
        ),
        max_size=4,
    )
)
async def test_random_queries(pairs: list[tuple[str, str]]) -> None:
    """Whatever is asked, the answer is a tree or an error that names the parameter."""
    cache = Cache()
    cache.prompt("acme", 1, 2, named="req")
    query = urlencode(pairs, errors="surrogatepass")
    exchange, answer = await cache.client().get(f"{PATH}?{query}", {"x-api-key": KEYS["ops"]})
    assert exchange.status in (200, 400, 404)
    if exchange.status == 200:
        assert answer["object"] == "cache.tree"
    else:
        assert answer["error"]["param"] in ("tenant", "from", "depth", "limit", "request")
