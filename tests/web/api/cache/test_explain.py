"""`GET /v1/cache/explain/{request_id}`: its shape, and that it tells a tenant nothing about another one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Hashable
from typing import Any
from urllib.parse import quote

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.messages.block_manager import CacheMiss, MissDetail, MissReason
from quipu.actors.messages.explanations import (
    Advice,
    AdviceCode,
    BlockSource,
    BlockSpan,
    EvictedBlock,
    ExplainedPrompt,
    Explanation,
    NamedRequest,
    PromptEnd,
    PromptOutline,
)
from quipu.actors.messages.prompts import PartSpan
from quipu.actors.messages.tiers import Tier
from quipu.web.api.admin.reports import Report
from quipu.web.api.cache import explain as explain_module
from quipu.web.api.cache.explanation_json import Reader, explanation_pieces
from quipu.web.app import make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from tests.prompts import prompt_of
from tests.runtimes import Client as RuntimeClient
from tests.runtimes import small_runtime
from tests.web.api.admin.usage_books import BookSource, record_at
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

KEYS = {"acme": "sk-of-acme", "b": "sk-of-b", "ops": "sk-of-ops"}


def key_store() -> KeyStore:
    return KeyStore(
        KeyEntry(id=f"id-{tenant}", name=tenant, tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
        for tenant, key in KEYS.items()
    )


def shown(explanation: Explanation, tenant: str | None) -> Any:
    """Return the JSON that a reader of this tenant gets, or an operator."""
    return json.loads(b"".join(explanation_pieces(explanation, Reader(tenant), 16)))


def outlined(*ends: int) -> PromptOutline:
    """Outline a prompt whose messages end there; the template writes the last piece."""
    messages = [*range(len(ends) - 1), None]
    roles = itertools.cycle(("user", "assistant"))
    places = zip(messages, roles, itertools.pairwise((0, *ends)), strict=False)
    return PromptOutline.of(PartSpan(message, None, role, *place) for message, role, place in places)


def explanation_of(prompt: ExplainedPrompt) -> Explanation:
    return Explanation("req-1", "acme", False, 100, 32, 0, 0, (prompt,), cached_by_tier=prompt.cached_by_tier)


EVICTED = ExplainedPrompt(
    100,
    32,
    1,
    2,
    (
        BlockSpan(0, 16, BlockSource.REUSED, Tier.DEVICE),
        BlockSpan(16, 32, BlockSource.REUSED, Tier.HOST),
        BlockSpan(32, 100, BlockSource.COMPUTED),
    ),
    outlined(20, 90, 100),
    PromptEnd(
        CacheMiss(MissReason.EVICTED, 32, MissDetail(9, 1.0, 2.0, 5)),
        evicted=EvictedBlock(1000.0004, NamedRequest("req-0", "acme"), 12.5),
    ),
    (Advice(AdviceCode.POOL_TOO_SMALL, 1, 32, 68), Advice(AdviceCode.VOLATILE_PREFIX, 1)),
    {Tier.DEVICE: 16, Tier.HOST: 16},
)


def test_form() -> None:
    """The answer has the documented form, with the message of every position, and a text for each advice."""
    answer = shown(explanation_of(EVICTED), "acme")
    (prompt,) = answer.pop("prompts")
    tiers = {"device": 16, "host": 16, "disk": 0, "remote": 0, "unattributed": 0}
    assert answer == {
        "request_id": "req-1",
        "model": "",
        "adapter": None,
        "parent": None,
        "state": "closed",
        "usage": {
            "prompt_tokens": 100,
            "cached_tokens": 32,
            "cached_tokens_by_tier": tiers,
            "restored_tokens": 0,
            "recomputed_tokens": 0,
        },
    }
    pool, volatile = prompt.pop("advice")
    assert prompt == {
        "prompt_tokens": 100,
        "cached_tokens": 32,
        "cached_tokens_by_tier": tiers,
        "restored_tokens": 1,
        "recomputed_tokens": 2,
        "lost_to_rounding": 0,
        "blocks": [
            {"start": 0, "end": 16, "source": "reused", "tier": "device"},
            {"start": 16, "end": 32, "source": "reused", "tier": "host"},
            {"start": 32, "end": 100, "source": "computed", "tier": None},
        ],
        "messages": [
            {"index": 0, "role": "user", "start": 0, "end": 20},
            {"index": 1, "role": "assistant", "start": 20, "end": 90},
            {"index": None, "role": "user", "start": 90, "end": 100},
        ],
        "ended": {
            "reason": "evicted",
            "token": 32,
            "message": 1,
            "part": None,
            "diverged_from": None,
            "evicted": {"at": 1000.0, "by": "req-0", "idle_s": 12.5},
        },
    }
    assert (pool["code"], pool["message"], pool["token"]) == ("pool_too_small", 1, 32)
    assert "68 blocks" in pool["text"] and "1088 tokens" in pool["text"]
    assert (volatile["message"], volatile["token"]) == (1, 20)


def test_every_advice_has_a_text() -> None:
    """Each code can be shown, for a message and for the tools."""
    for code in AdviceCode:
        for message in (None, 0):
            prompt = attrs.evolve(EVICTED, advice=(Advice(code, message),))
            (advice,) = shown(explanation_of(prompt), "acme")["prompts"][0]["advice"]
            assert advice["code"] == code.value and "{" not in advice["text"]


def test_lost_to_rounding() -> None:
    """What was cached beyond whole blocks is lost to rounding, and so is what the last block leaves."""
    reasons = (
        (MissReason.NONE, 32, 68),
        (MissReason.TOO_SHORT, 0, 68),
        (MissReason.DIVERGED, 40, 8),
        (MissReason.EVICTED, 32, 0),
        (MissReason.DISABLED, 0, 0),
    )
    for reason, token, lost in reasons:
        prompt = attrs.evolve(EVICTED, ended=PromptEnd(CacheMiss(reason, token)))
        assert shown(explanation_of(prompt), None)["prompts"][0]["lost_to_rounding"] == lost
    unknown = attrs.evolve(EVICTED, ended=None)
    assert shown(explanation_of(unknown), None)["prompts"][0]["lost_to_rounding"] is None


def test_another_tenants_part_has_no_name() -> None:
    """A tenant reads `evicted` without a name and `diverged`, where an operator reads the name and `other_domain`."""
    by_other = EvictedBlock(1000.0, NamedRequest("req-of-b", "b"), 12.5)
    evicted = attrs.evolve(EVICTED, ended=PromptEnd(CacheMiss(MissReason.EVICTED, 32), evicted=by_other))
    elsewhere = attrs.evolve(EVICTED, ended=PromptEnd(CacheMiss(MissReason.OTHER_DOMAIN, 0)))
    named, unnamed = (shown(explanation_of(evicted), reader)["prompts"][0]["ended"] for reader in (None, "acme"))
    assert (named["evicted"]["by"], unnamed["evicted"]["by"]) == ("req-of-b", None)
    reasons = [shown(explanation_of(elsewhere), reader)["prompts"][0]["ended"]["reason"] for reader in (None, "acme")]
    assert reasons == ["other_domain", "diverged"]


def test_ten_thousand_messages_are_made_in_pieces() -> None:
    """A prompt of many messages and blocks is made in pieces of a bounded size, which join to one JSON."""
    ends = list(range(1, 10_001))
    spans = tuple(BlockSpan(at, at + 1, BlockSource.COMPUTED) for at in range(5000))
    prompt = attrs.evolve(EVICTED, outline=outlined(*ends), blocks=spans)
    pieces = list(explanation_pieces(explanation_of(prompt), Reader(None), 16))
    assert max(map(len, pieces)) < 20_000
    (answer,) = json.loads(b"".join(pieces))["prompts"]
    assert len(answer["messages"]) == 10_000 and len(answer["blocks"]) == 5000


# ---------------------------------------------------------------- over HTTP


@attrs.define
class SlowSource(BookSource):
    """A ledger that takes a second, and counts how many read at once."""

    most: int = 0
    _num_now: int = 0

    async def report(self, report: Report, party: Hashable = None) -> list[bytes]:
        self._num_now += 1
        self.most = max(self.most, self._num_now)
        await trio.sleep(1)
        self._num_now -= 1
        return await BookSource.report(self, report)


async def get(client: Client, request_id: str, tenant: str | None) -> tuple[int, Any]:
    headers = {} if tenant is None else {"x-api-key": KEYS[tenant]}
    exchange, answer = await client.get(f"/v1/cache/explain/{request_id}", headers)
    return exchange.status, answer


async def test_other_tenants_request_is_unknown() -> None:
    """Another tenant's request, explained from memory or from its record, is a 404 like an unknown id: the same body
    after the same steps. Its own tenant and an admin read it."""
    asked: list[tuple[str, str | None]] = []

    def explain(request_id: str, tenant: str | None, /) -> Explanation | None:
        asked.append((request_id, tenant))
        found = attrs.evolve(explanation_of(EVICTED), request_id=request_id)
        return found if request_id == "req-1" and tenant in (None, "acme") else None

    source = BookSource([record_at(5, "req-2")])
    client = Client(make_app(FakeDesk(explain=explain), None, key_store(), usage=source))
    answers = [await get(client, name, "b") for name in ("req-1", "req-2", "req-9")]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == 404 and answers[0][1]["error"]["code"] == "record_not_found"
    assert asked == [(name, "b") for name in ("req-1", "req-2", "req-9")]
    assert [query.request_ids for query in source.seen_queries] == [("req-1",), ("req-2",), ("req-9",)]
    assert {query.tenants for query in source.seen_queries} == {("b",)}
    for tenant in ("acme", "ops"):
        for name in ("req-1", "req-2"):
            status, answer = await get(client, name, tenant)
            assert (status, answer["request_id"]) == (200, name)
    assert (await get(client, "req-1", None))[0] == 401


async def test_records_are_read_one_at_a_time(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests for old explanations, one reads its record, some wait, and the others get a 503."""
    monkeypatch.setattr(explain_module, "MAX_WAITING", 2)
    source, statuses = SlowSource([record_at(5, "req-2")]), []
    client = Client(make_app(FakeDesk(), None, None, usage=source))

    async def ask() -> None:
        statuses.append((await get(client, "req-2", None))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask)
    assert sorted(statuses) == [200] * 3 + [503] * 3
    assert source.most == 1


async def test_odd_ids() -> None:
    """Any path gets a response, and unprintable ids never reach a database."""
    source = BookSource([])
    client = Client(make_app(FakeDesk(), None, None, usage=source))
    for name in ("a\0b", "x" * 5000, "", "req-1/x"):
        status, answer = await get(client, name, None)
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error"), name
    assert [query.request_ids for query in source.seen_queries] == [("x" * 5000,)]


SYSTEM = "A quipu is a ledger of knotted cords, and what is tied into it stays. " * 3


def bodies_of_b() -> list[tuple[str, dict[str, Any]]]:
    """Return what tenant B sends: prompts that share blocks, diverge within blocks, and chats."""
    prompt = prompt_of(70, 1)

    def completion(tokens: list[int]) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {"model": "demo", "prompt": tokens, "max_tokens": 2, "temperature": 0}

    def chat(*texts: str) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user" if index % 2 else "system", "content": text} for index, text in enumerate(texts)]
        return "/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": 2, "temperature": 0}

    return [
        completion(prompt),
        completion(prompt),
        completion([*prompt[:5], 9, *prompt[6:]]),
        completion([*prompt[:40], 9, *prompt[41:]]),
        chat(SYSTEM, "Hello."),
        chat(SYSTEM, "Hello you."),
        chat(f"On day 12: {SYSTEM}", "Hello."),
        chat(f"On day 13: {SYSTEM}", "Hello."),
    ]


async def read_by_b(client: RuntimeClient, *, a_sends: bool) -> list[str]:
    """Send B's requests, after each of A's if A sends too, and return what B reads, with names in order of sending."""
    http = Client(make_app(client.runtime.desk, None, key_store(), usage=BookSource([])))
    names: list[str] = []
    of_a: list[str] = []
    for path, body in bodies_of_b():
        for tenant in ("acme", "b") if a_sends else ("b",):
            exchange, answer = await http.post(path, body, {"x-api-key": KEYS[tenant]})
            assert exchange.status == 200, answer
            (names if tenant == "b" else of_a).append(exchange.headers["x-quipu-request-id"])
    read = []
    for name in names:
        status, answer = await get(http, name, "b")
        assert status == 200
        read.append(re.sub(r"req-[0-9a-f]+", lambda match: f"request {names.index(match[0])}", json.dumps(answer)))
    for name in of_a:
        assert await get(http, name, "b") == await get(http, "req-of-nobody", "b")
    return read


async def test_what_b_reads_does_not_depend_on_a(autojump_clock: trio.abc.Clock) -> None:
    """Whether or not A has sent the same prompts before B, B reads the same explanations, byte by byte."""
    read = []
    for a_sends in (False, True):
        async with small_runtime(num_blocks=512) as client:
            read.append(await read_by_b(client, a_sends=a_sends))
    assert read[0] == read[1]
    assert "other_domain" not in str(read) and "request 0" in read[0][2], "a divergence names B's own request"


async def test_advice_over_http(autojump_clock: trio.abc.Clock) -> None:
    """A conversation with a time in its system prompt gets its advice, with the token at which that message begins."""
    messages: list[dict[str, str]] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "What is a quipu?"},
    ]
    codes = []
    async with small_runtime(max_model_len=1008) as runtime:
        client = Client(make_app(runtime.runtime.desk, None, key_store(), usage=BookSource([])))
        for number in range(3):
            messages[0]["content"] = f"It is {number}:15. {SYSTEM}"
            body = {"model": "demo", "messages": messages, "max_tokens": 2}
            exchange, answer = await client.post("/v1/chat/completions", body, {"x-api-key": KEYS["b"]})
            assert exchange.status == 200, answer
            _, shown_to_b = await get(client, exchange.headers["x-quipu-request-id"], "b")
            codes.append([(one["code"], one["message"], one["token"]) for one in shown_to_b["prompts"][0]["advice"]])
            messages += [{"role": "assistant", "content": SYSTEM[:80]}, {"role": "user", "content": "And then?"}]
    assert codes == [[], [], [("volatile_prefix", 0, 0)]]


@given(st.text(min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_random_ids(name: str) -> None:
    """Whatever is asked for, the answer is a 404 in the API's form."""

    async def ask() -> None:
        client = Client(make_app(FakeDesk(), None, None, usage=BookSource([])))
        status, answer = await get(client, quote(name, safe=""), None)
        assert status == 404 and answer["error"]["message"]

    trio.run(ask)
