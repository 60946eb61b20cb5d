"""`POST /v1/responses`: the response and its events, checked with the OpenAI client's types, and how requests fail."""

from __future__ import annotations

import json
import random
from typing import Any

import pydantic
import pytest
import trio
import trio.testing
from openai.types.responses import Response, ResponseStreamEvent
from structlog.testing import capture_logs

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.web.api.openai.responses_echo import MAX_ECHOED
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, failure, hello, record, scripted
from tests.web.wires import PATIENCE_S

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}
STREAM = {**BODY, "stream": True}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent, config=pydantic.ConfigDict(defer_build=True))
USAGE = {
    "input_tokens": 40,
    "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 43,
}
OUR_OWN = {"store", "frequency_penalty", "presence_penalty"}
"""In the documented object, but not in the client's type."""
BROKEN = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))


def cut(text: str) -> FakeDesk:
    """Return a desk whose response is cut by its limit."""
    return FakeDesk(scripted(STARTED, Delta(0, text, 3, FinishReason.LENGTH), Closed(record(), None)))


async def stream(desk: FakeDesk, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream that ended properly, each under its own name."""
    async with Client(make_app(desk)).open("POST", PATH, {**STREAM, **fields}) as exchange:
        assert await exchange.wait_started() == 200
        data = await exchange.read()
    assert exchange.headers["content-type"].startswith("text/event-stream")
    return read_events(data)


def read_events(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, content = block.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_whole_response() -> None:
    """The response is one completed message with its text, and the usage of the record."""
    exchange, answer = await Client(make_app(FakeDesk())).post(PATH, BODY)
    assert exchange.status == 200
    assert (answer["id"], answer["object"], answer["status"]) == ("resp_r1", "response", "completed")
    assert answer["output"] == [
        {
            "id": "msg_r1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert answer["usage"] == USAGE
    assert answer["error"] is None and answer["incomplete_details"] is None
    assert answer["completed_at"] >= answer["created_at"] > 0


async def test_limit() -> None:
    """A response cut by its limit is incomplete, and so is its message."""
    _, answer = await Client(make_app(cut("Hel"))).post(PATH, BODY)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"] == USAGE and answer["completed_at"] is None


async def test_request_is_echoed() -> None:
    """The object repeats the request with its defaults; `store` is always false."""
    echoed = {
        "instructions": "be brief", "max_output_tokens": 9, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "temperature": 0.5, "top_p": 0.25, "tool_choice": "none", "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "max_tool_calls": 2,
    }  # fmt: skip
    _, answer = await Client(make_app(FakeDesk())).post(PATH, {**BODY, **echoed, "store": True, "service_tier": "flex"})
    assert echoed.items() <= answer.items()
    assert (answer["model"], answer["store"], answer["service_tier"]) == ("tiny", False, "default")
    _, answer = await Client(make_app(FakeDesk())).post(PATH, BODY)
    assert (answer["temperature"], answer["top_p"], answer["metadata"], answer["tool_choice"]) == (1.0, 1.0, {}, "auto")
    assert answer["text"] == {"format": {"type": "text"}} and answer["truncation"] == "disabled"


@pytest.mark.parametrize("name", ["instructions", "user", "safety_identifier", "prompt_cache_key", "text"])
async def test_what_is_echoed_is_small(name: str) -> None:
    """Each version of a response repeats a text only if that is small, since it is encoded anew each time."""
    for length, is_told in ((MAX_ECHOED // 2, True), (MAX_ECHOED, False)):
        given: Any = "x" * length
        if name == "text":
            given = {"format": {"type": "json_schema", "name": "f", "schema": {}, "description": given}}
        async with Client(make_app(FakeDesk())).open("POST", PATH, {**BODY, name: given, "stream": True}) as exchange:
            await exchange.wait_started()
            data = await exchange.read()
        assert data.count(b"x" * length) == 3 * is_told  # created, in progress, completed


async def test_tiers_on_request() -> None:
    """Cached tokens by tier and miss reasons are available, as on the other endpoints."""
    _, answer = await Client(make_app(FakeDesk())).post(PATH, {**BODY, "return_cached_tokens_details": True})
    details = answer["usage"]["input_tokens_details"]
    assert details["cached_tokens_by_tier"]["device"] == details["cached_tokens"] == 32
    assert details["cache_misses"] == []


async def test_openai_types_know_every_field() -> None:
    """The client's types accept the response and every event strictly, and find no unknown field."""
    for desk in (FakeDesk(), cut("Hel")):
        _, answer = await Client(make_app(desk)).post(PATH, BODY)
        parsed = Response.model_validate(answer, strict=True)
        assert set(parsed.model_extra or ()) == OUR_OWN
        assert parsed.usage is not None and not parsed.usage.input_tokens_details.model_extra
        output: Any = parsed.output[0]
        assert not output.model_extra and not output.content[0].model_extra
        assert parsed.output_text in ("Hello", "Hel")
    broken = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), BROKEN))
    for desk in (FakeDesk(), cut("Hel"), broken):
        for event in await stream(desk):
            read = EVENT.validate_python(event, strict=True)
            assert set(read.model_extra or ()) <= ({"error"} if event["type"] == "error" else set())


async def test_stream() -> None:
    """The documented events come in the documented order, numbered from 0; the object grows, and the last one has
    usage.
    """
    events = await stream(FakeDesk())
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, _, added, part, first, second, text, part_done, done, completed = events
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert created["response"]["usage"] is None and events[1]["response"]["usage"] is None
    assert added["item"] == {**done["item"], "status": "in_progress", "content": []}
    assert part["part"] == {**part_done["part"], "text": ""}
    assert [first["delta"], second["delta"], text["text"], part_done["part"]["text"]] == ["Hel", "lo", "Hello", "Hello"]
    for event in (part, first, second, text, part_done):
        assert (event["item_id"], event["output_index"], event["content_index"]) == ("msg_r1", 0, 0)
    assert completed["response"]["output"] == [done["item"]]
    assert completed["response"]["usage"] == USAGE


async def test_stream_ends_with_the_whole_response() -> None:
    """The last event contains the whole response, complete or cut."""
    for desk, name in ((FakeDesk(), "completed"), (cut('"\n\\ü'), "incomplete")):
        _, whole = await Client(make_app(desk)).post(PATH, BODY)
        last = (await stream(desk))[-1]
        own = {"id", "created_at", "completed_at", "output"}
        assert last["type"] == f"response.{name}"
        assert {k: v for k, v in last["response"].items() if k not in own} == {
            k: v for k, v in whole.items() if k not in own
        }
        assert last["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_response_without_text() -> None:
    """A response without text still has a message, whole and streamed."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "", 1, FinishReason.STOP), Closed(record(), None)))
    _, answer = await Client(make_app(desk)).post(PATH, BODY)
    assert answer["output"][0]["content"][0]["text"] == ""
    events = await stream(desk)
    assert "response.output_text.delta" not in [event["type"] for event in events]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
    silent = await stream(FakeDesk(scripted(STARTED, Closed(record(), None))))
    assert [event["type"] for event in silent] == [event["type"] for event in events]


async def test_any_split_of_the_text() -> None:
    """However the text is split, deltas, done events and the whole response have the same text."""
    chance = random.Random(5)
    for _ in range(50):
        pieces = [
            "".join(chance.choices('ab"\\\n\u2028é€😀<|{}', k=chance.randrange(4))) for _ in range(chance.randrange(9))
        ]
        deltas = [Delta(0, piece, 1, None) for piece in pieces]
        desk = FakeDesk(scripted(STARTED, *deltas, Delta(0, "", 0, FinishReason.STOP), Closed(record(), None)))
        events = await stream(desk)
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert (
            text == "".join(pieces) == events[-1]["response"]["output"][0]["content"][0]["text"] == events[-4]["text"]
        )
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_error_in_mid_stream() -> None:
    """An `error` event on which clients raise, then the failed response with the text sent and the tokens counted."""
    events = await stream(FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), BROKEN)))
    error, failed = events[-2:]
    error_fields = {"type": "server_error", "code": "internal_error", "message": "engine died", "param": None}
    assert error == {**error_fields, "type": "error", "sequence_number": 5, "error": error_fields}
    assert failed["type"] == "response.failed" and failed["sequence_number"] == 6
    response = failed["response"]
    assert response["status"] == "failed" and response["usage"] == USAGE
    assert response["error"] == {
        "code": "server_error",
        "message": "engine died",
        "type": "server_error",
        "param": None,
    }
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "half"
    assert not any(event["type"].endswith(".done") for event in events)


async def test_failure_before_the_first_token() -> None:
    """A stream that fails after its admission, before the first token, has no item; unknown counts are absent."""
    unknown = record(outcome=Outcome.FAILED, cached_tokens=None, completion_tokens=0)
    events = await stream(FakeDesk(scripted(STARTED, Closed(unknown, RequestError(ErrorKind.TIMEOUT, "too late")))))
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in events] == kinds
    assert events[-1]["response"]["output"] == []
    assert "cached_tokens" not in events[-1]["response"]["usage"]["input_tokens_details"]


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED, Outcome.REJECTED])
async def test_end_without_reason_is_an_error(outcome: Outcome) -> None:
    """A partial response is never taken for a whole one, even if no error was reported."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), Closed(record(outcome=outcome), None)))
    exchange, answer = await Client(make_app(desk)).post(PATH, BODY)
    assert exchange.status == 500 and "output" not in answer
    assert [event["type"] for event in await stream(desk)][-2:] == ["error", "response.failed"]


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize(
    ("kind", "status", "error_type"),
    [
        (ErrorKind.INVALID, 400, "invalid_request_error"),
        (ErrorKind.OVERLOADED, 503, "service_unavailable"),
        (ErrorKind.TIMEOUT, 504, "timeout_error"),
        (ErrorKind.INTERNAL, 500, "server_error"),
    ],
)
async def test_early_error_has_its_status(body: object, kind: ErrorKind, status: int, error_type: str) -> None:
    """A request that could not start is never answered with a 200, streamed or not."""
    desk = FakeDesk(scripted(failure(kind, "because", param="input", code="why")))
    exchange, answer = await Client(make_app(desk)).post(PATH, body)
    assert exchange.status == status
    param = "input" if kind is ErrorKind.INVALID else None
    assert answer["error"] == {"message": "because", "type": error_type, "param": param, "code": "why"}
    assert desk.ticket.num_leaves == 1


async def test_writer_failure_affects_only_its_own_stream() -> None:
    """Text that cannot be encoded fails its own stream, after the text before it; the producer sees no exception."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "a", 1, None)))
    async with Client(make_app(desk)).open("POST", PATH, STREAM) as exchange:
        await exchange.wait_started()
        data = await exchange.read_some()
        desk.ticket.mailbox.put(Delta(0, "\ud800", 1, None))
        desk.ticket.mailbox.put(Delta(0, "b", 1, FinishReason.STOP))
        events = read_events(data + await exchange.read())
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2, "without a record, usage must have the counts so far"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_deadline(autojump_clock: trio.abc.Clock) -> None:
    """A response that is not finished by its deadline is a 504, and its ticket is left."""
    late = FakeDesk(scripted())
    exchange, answer = await Client(make_app(late, AppOptions(request_timeout_s=5.0))).post(PATH, BODY)
    assert exchange.status == 504 and "longer than 5 seconds" in answer["error"]["message"]
    assert late.ticket.num_leaves == 1


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("num_events", range(len(hello()) + 1))
async def test_client_disconnects(body: dict[str, Any], num_events: int) -> None:
    """A client that disconnects at any event leaves its ticket once, and no task remains."""
    desk = FakeDesk(scripted(*hello()[:num_events]))
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.fail_after(PATIENCE_S):
        async with Client(make_app(desk)).open("POST", PATH, body) as exchange:
            await trio.testing.wait_all_tasks_blocked()
            exchange.leave()
            await trio.testing.wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().tasks_living == num_tasks
    assert desk.ticket.num_leaves == 1


async def test_cancellation_at_every_checkpoint() -> None:
    """Cancelled at every task step in turn, a request leaves every ticket that it opened."""
    for body in (BODY, STREAM):
        k = 0
        cancelled = True
        while cancelled:
            k += 1
            desk = FakeDesk()
            instrument = CancelAt(k)
            with trio.CancelScope() as scope:
                instrument.scope = scope
                trio.lowlevel.add_instrument(instrument)
                async with Client(make_app(desk)).open("POST", PATH, body) as exchange:
                    await exchange.wait_started()
                    await exchange.read()
            trio.lowlevel.remove_instrument(instrument)
            assert all(ticket.num_leaves == 1 for ticket in desk.tickets), k
            cancelled = scope.cancelled_caught
        assert 5 < k < 500, "the sweep must cover a whole request"


class CancelAt(trio.abc.Instrument):
    """Cancels a scope before the k-th task step."""

    def __init__(self, k: int) -> None:
        self.count = 0
        self.k = k
        self.scope: trio.CancelScope | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        if self.count == self.k and self.scope is not None:
            self.scope.cancel()


async def test_log_line() -> None:
    """The request has one log line at info level with the endpoint's route and the record's numbers."""
    with capture_logs() as lines:
        await Client(make_app(FakeDesk())).post(PATH, BODY)
    (line,) = [line for line in lines if line["event"] == "request.done"]
    assert (line["endpoint"], line["outcome"], line["log_level"]) == (PATH, "finished", "info")
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (40, 32, 3)
