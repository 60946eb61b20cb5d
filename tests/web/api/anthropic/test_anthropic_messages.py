"""`/v1/messages`: whole and streamed responses, errors, and token counting."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio

from quipu.actors.messages.handler import Closed, Delta, OutletEvent, Started
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.prompts import Prompt
from quipu.actors.request_desk.interface import PromptRefused
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, body, stream, text, total
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, FakeDesk, failure, record, scripted

STARTED = Started(40, 16, 24, created_5m_tokens=3, created_1h_tokens=5)
RECORD = record(cached_tokens=16, cache_write_tokens=24, completion_tokens=2)
USAGE = {
    "input_tokens": 16,
    "cache_creation_input_tokens": 8,
    "cache_read_input_tokens": 16,
    "cache_creation": {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 5},
}


def closed() -> Closed:
    return Closed(attrs.evolve(RECORD, created_5m_tokens=3, created_1h_tokens=5), None)


def script(reason: FinishReason = FinishReason.STOP, match: str | None = None) -> list[OutletEvent]:
    return [STARTED, Delta(0, "Hel", 1, None), Delta(0, "lo", 1, reason, match), closed()]


def desk_for(reason: FinishReason = FinishReason.STOP, match: str | None = None) -> FakeDesk:
    return FakeDesk(scripted(*script(reason, match)))


async def test_whole_response() -> None:
    """The response is one assistant message with one text, under the requested model, with usage whose parts add up."""
    exchange, answer = await Client(make_app(desk_for())).post(PATH, body(model="org/tiny"))
    assert exchange.status == 200
    usage = answer.pop("usage")
    assert answer == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "org/tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert usage["output_tokens"] == 2 and usage["service_tier"] == "standard"
    assert {name: usage[name] for name in USAGE} == USAGE and total(usage) == 40
    assert exchange.headers["request-id"] == exchange.headers["x-quipu-request-id"] == "r1"


@pytest.mark.parametrize(
    ("reason", "match", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.STOP, "END", ("stop_sequence", "END")),
    ],
)
async def test_stop_reasons(reason: FinishReason, match: str | None, expected: tuple[str, str | None]) -> None:
    """The stop reason and stop string are the same, whole and streamed."""
    client = Client(make_app(desk_for(reason, match)))
    _, answer = await client.post(PATH, body())
    _, events = await stream(client, body())
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    delta = events[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


async def test_stream() -> None:
    """The events are in order; the first and last usage differ only in the output."""
    exchange, events = await stream(Client(make_app(desk_for())), body())
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["request-id"] == "r1"
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["id"] == "msg_r1"
    assert [event["delta"] for event in events[2:4]] == [{"type": "text_delta", "text": t} for t in ("Hel", "lo")]
    for usage, num_output in ((start["usage"], 0), (events[5]["usage"], 2)):
        assert {name: usage[name] for name in USAGE} == USAGE
        assert usage["output_tokens"] == num_output


async def test_token_without_text() -> None:
    """A token without text begins the message and makes no delta."""
    empty = [STARTED, Delta(0, "", 1, None), Delta(0, "", 1, FinishReason.STOP), closed()]
    client = Client(make_app(FakeDesk(scripted(*empty))))
    _, events = await stream(client, body())
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    assert kinds == ["message_start", "start", "stop", "message_delta", "message_stop"]
    _, answer = await client.post(PATH, body())
    assert answer["content"][0]["text"] == ""


async def test_nothing_is_sent_before_the_first_token(autojump_clock: trio.abc.Clock) -> None:
    """`message_start` waits for the first token, since cache writes may still grow; meanwhile there are pings."""
    desk = FakeDesk(scripted(Started(40, 16, 0)))
    app = make_app(desk, AppOptions(heartbeat_s=1.0))
    async with Client(app).open("POST", PATH, body(stream=True)) as exchange:
        await exchange.wait_started()
        assert await exchange.read_some() == b'event: ping\ndata: {"type":"ping"}\n\n'
        for event in script():
            desk.ticket.mailbox.put(event)
        assert b'"cache_creation_input_tokens":8' in (await exchange.read_some()).partition(b"\n\n")[0]


async def test_error_in_mid_stream() -> None:
    """An `error` event in the API's shape ends the stream."""
    failed = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), failed))
    exchange, events = await stream(Client(make_app(desk)), body())
    assert exchange.status == 200 and exchange.ended
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    error = {"type": "api_error", "message": "engine died"}
    assert events[-1] == {"type": "error", "error": error, "request_id": "r1"}
    exchange, answer = await Client(make_app(desk)).post(PATH, body())
    assert exchange.status == 500 and answer["error"] == error


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "error_type"),
    [
        (ErrorKind.INVALID, 400, "invalid_request_error"),
        (ErrorKind.OVERLOADED, 529, "overloaded_error"),
        (ErrorKind.TIMEOUT, 504, "timeout_error"),
        (ErrorKind.INTERNAL, 500, "api_error"),
    ],
)
async def test_early_errors(streamed: bool, kind: ErrorKind, status: int, error_type: str) -> None:
    """A request that could not start has its own status, in this API's shape."""
    desk = FakeDesk(scripted(failure(kind, "because")))
    exchange, answer = await Client(make_app(desk)).post(PATH, body(stream=streamed))
    assert exchange.status == status
    assert answer == {"type": "error", "error": {"type": error_type, "message": "because"}, "request_id": "r1"}
    assert ("retry-after" in exchange.headers) == (status == 529)
    assert exchange.headers["request-id"] == "r1"
    assert desk.ticket.num_leaves == 1


async def test_closed_desk() -> None:
    """A closed desk is a 529 with Retry-After."""
    exchange, answer = await Client(make_app(FakeDesk(closed="draining"))).post(PATH, body())
    assert (exchange.status, exchange.headers["retry-after"]) == (529, "1")
    assert answer["error"] == {"type": "overloaded_error", "message": "draining"}


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "error_type"),
    [
        ("POST", PATH, b"{bad", 400, "invalid_request_error"),
        ("POST", PATH, b"[]", 400, "invalid_request_error"),
        ("POST", COUNT_PATH, b"{bad", 400, "invalid_request_error"),
        ("POST", PATH, body(model="huge"), 404, "not_found_error"),
        ("POST", COUNT_PATH, body(model="huge"), 404, "not_found_error"),
        ("GET", PATH + "/batches", b"", 404, "not_found_error"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", PATH, body(system="x" * 2000), 413, "request_too_large"),
    ],
)
async def test_shape_of_other_errors(method: str, path: str, sent: object, status: int, error_type: str) -> None:
    """All errors below this path have this API's shape."""
    app = make_app(FakeDesk(), AppOptions(max_body_bytes=1000))
    async with Client(app).open(method, path, sent) as exchange:
        answer = await exchange.json()
    assert exchange.status == status
    assert answer["type"] == "error" and answer["error"]["type"] == error_type
    assert answer["request_id"] == exchange.headers["request-id"] == "r1"


async def test_client_disconnects() -> None:
    """If the client disconnects, its ticket is left once."""
    desk = FakeDesk(scripted(*script()[:2]))
    async with Client(make_app(desk)).open("POST", PATH, body(stream=True)) as exchange:
        await exchange.wait_started()
        await exchange.read_some()
        exchange.leave()
        with pytest.raises(trio.EndOfChannel):
            while True:
                await exchange.read_some()
    assert desk.ticket.num_leaves == 1


async def test_count_tokens() -> None:
    """The desk counts exactly the prompt that would be served; no request is opened."""
    prompts: list[Prompt] = []

    def count(prompt: Prompt, param: str) -> int:
        assert param == "messages"
        prompts.append(prompt)
        return 17

    desk = FakeDesk(counted=count)
    request = body(system=[text("be brief", cache_control={"type": "ephemeral"})])
    exchange, answer = await Client(make_app(desk)).post(COUNT_PATH, {**request, "max_tokens": None})
    assert (exchange.status, answer) == (200, {"input_tokens": 17})
    assert desk.tickets == []
    await Client(make_app(desk)).post(PATH, request)
    assert desk.ticket.encode.prompts == tuple(prompts)


async def test_count_of_unrenderable_prompt() -> None:
    """The tokenizer's error is returned in this API's shape."""

    def refuse(prompt: Prompt, param: str) -> int:
        raise PromptRefused(RequestError(ErrorKind.INVALID, "roles must alternate", param))

    exchange, answer = await Client(make_app(FakeDesk(counted=refuse))).post(COUNT_PATH, body())
    assert exchange.status == 400
    assert answer["error"] == {"type": "invalid_request_error", "message": "roles must alternate"}


async def test_models() -> None:
    """Models have this API's shape for clients that send `anthropic-version`, OpenAI's for others."""
    client, version = Client(make_app(FakeDesk())), {"anthropic-version": "2023-06-01"}
    exchange, page = await client.get("/v1/models", version)
    assert exchange.headers["request-id"] == "r1"
    assert [model["id"] for model in page["data"]] == ["org/tiny", "tiny"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "org/tiny", "tiny")
    _, model = await client.get("/v1/models/org/tiny", version)
    assert model == page["data"][0]
    assert (model["type"], model["created_at"]) == ("model", "2023-11-14T22:13:20Z")
    exchange, answer = await client.get("/v1/models/huge", version)
    assert exchange.status == 404 and answer["error"]["type"] == "not_found_error"
    exchange, page = await client.get("/v1/models")
    assert page["object"] == "list" and "request-id" not in exchange.headers


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("limit=2", ["a", "b"], True),
        ("limit=2&after_id=b", ["c", "d"], False),
        ("limit=1&after_id=b", ["c"], True),
        ("limit=2&before_id=d", ["b", "c"], True),
        ("before_id=b", ["a"], False),
        ("after_id=d", [], False),
    ],
)
async def test_pages_of_models(query: str, ids: list[str], has_more: bool) -> None:
    """A client may ask for the models page by page, forwards and backwards."""
    desk = FakeDesk(info=attrs.evolve(INFO, model_names=("a", "b", "c", "d")))
    _, page = await Client(make_app(desk)).get(f"/v1/models?{query}", {"anthropic-version": "2023-06-01"})
    assert [model["id"] for model in page["data"]] == ids and page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=abc", "after_id=other", "before_id=other"])
async def test_invalid_pages_of_models(query: str) -> None:
    """The error names the parameter."""
    exchange, answer = await Client(make_app(FakeDesk())).get(f"/v1/models?{query}", {"anthropic-version": "x"})
    assert exchange.status == 400 and query.partition("=")[0] in answer["error"]["message"]


async def test_unknown_betas_and_fields_are_ignored() -> None:
    """Unknown betas and fields do not prevent a request from being served."""
    headers = {"anthropic-beta": "interleaved-2030-01-01,other", "anthropic-version": "2023-06-01"}
    fields: dict[str, Any] = {"context_management": {"edits": []}, "service_tier": "auto", "novelty": [1]}
    # and fields of other APIs, with neutral values
    fields |= {"n": 1, "stop": None, "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    exchange, _ = await Client(make_app(FakeDesk())).post(PATH, body(**fields), headers)
    assert exchange.status == 200
