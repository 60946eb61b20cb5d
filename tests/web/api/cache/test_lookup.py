"""`POST /v1/cache/lookup`: what it reads, what it answers, and what it refuses."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.outcomes import ErrorKind, RequestError
from quipu.actors.messages.prompts import PartSpan
from quipu.actors.request_desk.interface import DeskClosed, PromptRefused
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.auth.test_auth import A, B, bearer, closed_app
from tests.web.fakes import FOUND, FakeDesk

PATH = "/v1/cache/lookup"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": SAID, "cache_salt": "s", "seed": 1},
    COMPLETIONS: {"model": "tiny", "prompt": ["one", "two"], "cache_salt": "s", "seed": 1},
    RESPONSES: {"model": "tiny", "input": "hello", "cache_salt": "s", "seed": 1},
    MESSAGES: {"model": "tiny", "max_tokens": 4, "messages": SAID, "cache_salt": "s", "seed": 1},
}


async def look_up(desk: FakeDesk, url: str, body: object, **fields: Any) -> tuple[Any, Any]:
    app = make_app(desk, AppOptions(domain="tenant"))
    return await Client(app).post(PATH, {"url": url, "body": body, **fields})


@pytest.mark.parametrize("url", BODIES)
async def test_the_request_is_the_one_that_would_be_served(url: str) -> None:
    """The desk gets the message that the request itself would send, with its tenant and salt; nothing is opened."""
    desk = FakeDesk()
    exchange, answer = await look_up(desk, url, BODIES[url], custom_id="1", method="POST")
    assert exchange.status == 200 and len(answer["prompts"]) == len(desk.looked_up[0].prompts)
    served = FakeDesk()
    await Client(make_app(served, AppOptions(domain="tenant"))).post(url, BODIES[url])
    (asked,) = desk.looked_up
    assert asked == attrs.evolve(served.ticket.encode, request_id=asked.request_id)
    assert (asked.domain, asked.cache_salt) == ("tenant", "s") and not desk.tickets


async def test_a_key_looks_into_its_own_tenants_cache() -> None:
    """A look-up needs a key like any request, and its body cannot name another tenant."""
    desk = FakeDesk()
    client, question = Client(closed_app(desk)), {"url": CHAT, "body": {**BODIES[CHAT], "user": "b"}}
    exchange, answer = await client.post(PATH, question)
    assert exchange.status == 401 and answer["error"]["code"] == "invalid_api_key"
    for key in (A, B):
        exchange, _ = await client.post(PATH, question, bearer(key))
        assert exchange.status == 200
    assert [asked.domain for asked in desk.looked_up] == ["a", "b"]


async def test_the_answer_says_where_and_why_the_prefix_ends() -> None:
    """The answer has the numbers by tier, the engine, the pin, and the message and part in which the prefix ends."""
    spans = (PartSpan(None, None, "system", 0, 20), PartSpan(1, 0, "user", 20, 33), PartSpan(1, 1, "user", 33, 40))
    found = attrs.evolve(
        FOUND, engine_id=3, miss=CacheMiss(MissReason.OTHER_DOMAIN, 35), pinned_for_s=299.5, spans=spans
    )
    before = time.time()
    _, answer = await look_up(FakeDesk(found=found), CHAT, BODIES[CHAT])
    (prompt,) = answer["prompts"]
    assert before + 298 <= prompt.pop("pinned_until") <= time.time() + 300
    assert prompt == {
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "cached_tokens_by_tier": {"device": 32, "host": 0, "disk": 0, "remote": 0, "unattributed": 0},
        "prefetching_tokens": 0,
        "engine": 3,
        "ends_at": {"token": 35, "message": 1, "part": 1, "reason": "diverged"},
    }


@pytest.mark.parametrize("lower", [{"host": 16}, {"disk": 16}, {"host": 8, "disk": 8, "remote": 16}])
async def test_tiers(lower: dict[str, int]) -> None:
    """Tokens that would be loaded from lower tiers are listed by tier, apart from those on the device."""
    _, answer = await look_up(FakeDesk(found=attrs.evolve(FOUND, num_tokens_by_tier=lower)), CHAT, BODIES[CHAT])
    tiers = answer["prompts"][0]["cached_tokens_by_tier"]
    assert tiers == {"host": 0, "disk": 0, "remote": 0, "unattributed": 0, **lower, "device": 32 - sum(lower.values())}


@pytest.mark.parametrize("fields", [{}, {"prefetch": False}, {"prefetch": None}, {"prefetch": True}], ids=str)
async def test_prefetch(fields: dict[str, Any]) -> None:
    """The engine is only asked to prefetch if the client says so; the answer says how many tokens are on their way."""
    desk = FakeDesk(found=attrs.evolve(FOUND, prefetching_tokens=16 if fields.get("prefetch") else 0))
    exchange, answer = await look_up(desk, COMPLETIONS, BODIES[COMPLETIONS], **fields)
    assert exchange.status == 200 and desk.prefetched == [fields.get("prefetch") or False]
    assert [prompt["prefetching_tokens"] for prompt in answer["prompts"]] == [16 if desk.prefetched[0] else 0] * 2


async def test_prefetch_is_a_boolean() -> None:
    """Nothing else is taken for `prefetch`, and no body of a request has it."""
    for fields in ({"prefetch": 1}, {"prefetch": "true"}):
        desk = FakeDesk()
        exchange, answer = await look_up(desk, CHAT, BODIES[CHAT], **fields)
        assert (exchange.status, answer["error"]["param"], desk.looked_up) == (400, "prefetch", [])
    desk = FakeDesk()
    await look_up(desk, CHAT, {**BODIES[CHAT], "prefetch": True})
    assert desk.prefetched == [False]


async def test_nothing_ends_where_all_is_cached() -> None:
    """If everything is cached and nothing is pinned, `ends_at` and `pinned_until` are null."""
    _, answer = await look_up(FakeDesk(), RESPONSES, BODIES[RESPONSES])
    assert answer["prompts"][0]["ends_at"] is None and answer["prompts"][0]["pinned_until"] is None


async def test_ignored_fields_are_named() -> None:
    """Unknown fields of the body are named in the header, as for the request itself."""
    exchange, _ = await look_up(FakeDesk(), MESSAGES, {**BODIES[MESSAGES], "oddity": 1})
    assert exchange.headers["x-quipu-ignored-fields"] == "oddity"


@pytest.mark.parametrize(
    ("request_body", "param", "code"),
    [
        ({"body": {}}, "url", "missing_required_parameter"),
        ({"url": 1, "body": {}}, "url", "invalid_type"),
        ({"url": "/v1/messages/count_tokens", "body": {}}, "url", "invalid_value"),
        ({"url": "/v1/embeddings", "body": {}}, "url", "invalid_value"),
        ({"url": CHAT}, "body", "missing_required_parameter"),
        ({"url": CHAT, "body": [1]}, "body", "invalid_type"),
        ({"url": CHAT, "body": BODIES[CHAT], "method": "GET"}, "method", "invalid_value"),
        ({"url": CHAT, "body": BODIES[CHAT], "salt": "x"}, "salt", "unknown_parameter"),
        ({"url": CHAT, "body": {"model": "tiny"}}, "messages", "missing_required_parameter"),
        ({"url": CHAT, "body": {**BODIES[CHAT], "model": "x"}}, "model", "model_not_found"),
        ({"url": CHAT, "body": {**BODIES[CHAT], "priority": 1}}, "priority", "priority_not_allowed"),
        ({"url": MESSAGES, "body": {**BODIES[MESSAGES], "max_tokens": -1}}, "max_tokens", "invalid_value"),
    ],
)
async def test_bad_input(request_body: dict[str, Any], param: str, code: str) -> None:
    """Errors name the field, have the shape of OpenAI's, and precede any question to the desk."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(PATH, request_body)
    assert exchange.status in (400, 404)
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert not desk.looked_up


async def test_the_bound_of_a_chat_holds() -> None:
    """A body that begins as a completion's, which may have more values, is not read as a chat's."""
    desk = FakeDesk()
    begun = b'{"url": "/v1/completions", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": []}}'
    exchange, answer = await Client(make_app(desk)).post(PATH, begun)
    assert (exchange.status, answer["error"]["param"]) == (400, "url")
    many = b'{"body": {"model": "tiny", "prompt": [%b]}, "url": "/v1/completions"}' % b",".join([b"1"] * (1 << 19))
    exchange, answer = await Client(make_app(desk)).post(PATH, many)
    assert (exchange.status, answer["error"]["code"]) == (400, "body_too_complex")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PromptRefused(RequestError(ErrorKind.INVALID, "too long", "messages", "context_length_exceeded")), 400),
        (PromptRefused(RequestError(ErrorKind.OVERLOADED, "no engine")), 503),
        (DeskClosed("too many are open"), 503),
    ],
)
async def test_what_the_desk_refuses(error: Exception, status: int) -> None:
    """An error of the desk has the status and the message that it has for a request."""

    @attrs.define(eq=False)
    class RefusingDesk(FakeDesk):
        async def look_up(self, request: object, /, *, prefetch: bool = False) -> Any:
            raise error

    exchange, answer = await look_up(RefusingDesk(), CHAT, BODIES[CHAT])
    assert exchange.status == status and str(error) in answer["error"]["message"]
