"""Requests that fail after they were accepted: with a status before the first token, with an event in mid-stream."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.asgi_client import Client
from tests.web.fakes import STARTED, FakeDesk, failure, hello, record, scripted
from tests.web.surfaces import events_of

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "once"}
STREAM = {**BODY, "stream": True}


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
    desk = FakeDesk(scripted(failure(kind, "because", param="prompt", code="why")))
    exchange, answer = await Client(make_app(desk)).post(PATH, body)
    assert exchange.status == status
    assert exchange.headers["content-type"] == "application/json"
    assert ("retry-after" in exchange.headers) == (status == 503)
    param = "prompt" if kind is ErrorKind.INVALID else None
    assert answer["error"] == {"message": "because", "type": error_type, "param": param, "code": "why"}
    assert desk.ticket.num_leaves == 1


async def test_deadline(autojump_clock: trio.abc.Clock) -> None:
    """A request that exceeds its deadline gets a 504; one that does not is unaffected."""
    late = FakeDesk(scripted())
    exchange, answer = await Client(make_app(late, AppOptions(request_timeout_s=5.0))).post(PATH, BODY)
    assert exchange.status == 504 and "longer than 5 seconds" in answer["error"]["message"]
    assert trio.current_time() >= 5 and late.ticket.num_leaves == 1
    early = FakeDesk()
    exchange, _ = await Client(make_app(early, AppOptions(request_timeout_s=5.0))).post(PATH, BODY)
    assert exchange.status == 200 and early.ticket.expired_after_s is None


async def test_error_in_mid_response() -> None:
    """A whole response that failed midway is an error with a status, without partial output."""
    closed = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), closed))
    exchange, answer = await Client(make_app(desk)).post(PATH, BODY)
    assert exchange.status == 500 and answer["error"]["message"] == "engine died" and "choices" not in answer


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_error_in_mid_stream(path: str) -> None:
    """The stream ends with one error event, [DONE] and a proper end. Earlier chunks remain valid, and no
    usage follows."""
    closed = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), closed))
    body = {**STREAM, "messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}}
    exchange, chunks = await Client(make_app(desk)).stream(path, body)
    assert exchange.status == 200 and exchange.ended
    assert chunks[-1] == "[DONE]"
    assert chunks[-2] == {
        "error": {"message": "engine died", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert all(chunk["choices"] for chunk in chunks[:-2])


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED, Outcome.REJECTED])
async def test_end_without_reason_is_an_error(outcome: Outcome) -> None:
    """A partial response without a finish reason is never taken for a complete one."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "half", 1, None), Closed(record(outcome=outcome), None)))
    client = Client(make_app(desk))
    exchange, _ = await client.post(PATH, BODY)
    assert exchange.status == 500
    _, chunks = await client.stream(PATH, STREAM)
    assert "error" in chunks[-2]


async def test_closed_desk() -> None:
    """A closed desk is a 503 with Retry-After and the desk's message."""
    exchange, answer = await Client(make_app(FakeDesk(closed="draining"))).post(PATH, BODY)
    assert exchange.status == 503 and exchange.headers["retry-after"] == "1"
    assert answer["error"]["message"] == "draining"


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_unexpected_exception(body: object) -> None:
    """A bug is a 500 in the same shape without details, and the ticket is left."""
    desk = FakeDesk(start_error=RuntimeError("a secret"))
    exchange, answer = await Client(make_app(desk)).post(PATH, body)
    assert exchange.status == 500 and answer["error"]["type"] == "server_error"
    assert "secret" not in str(answer)
    assert desk.ticket.num_leaves == 1


async def test_failing_writer_is_contained() -> None:
    """A text that cannot be encoded ends its own stream with an error; the producer sees no exception."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "a", 1, None)))
    async with Client(make_app(desk)).open("POST", PATH, STREAM) as exchange:
        await exchange.wait_started()
        assert b'"a"' in await exchange.read_some()
        desk.ticket.mailbox.put(Delta(0, "\ud800", 1, None))
        desk.ticket.mailbox.put(Delta(0, "b", 1, FinishReason.STOP))
        rest = await exchange.read()
    assert b"server_error" in rest and b'"b"' not in rest and rest.endswith(b"data: [DONE]\n\n")


async def test_tokens_are_written_as_they_come() -> None:
    """Tokens that arrive together are one write, others one each."""
    desk = FakeDesk(scripted(STARTED, Delta(0, "a", 1, None), Delta(0, "b", 1, None)))
    async with Client(make_app(desk)).open("POST", PATH, STREAM) as exchange:
        await exchange.wait_started()
        assert (await exchange.read_some()).count(b"data: ") == 2
        for text in "cd":
            desk.ticket.mailbox.put(Delta(0, text, 1, None))
            assert (await exchange.read_some()).count(b"data: ") == 1
        desk.ticket.mailbox.put(Closed(record(), None))
        assert await exchange.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("events", [(), (STARTED,), (STARTED, Delta(0, "a", 1, None))])
async def test_client_disconnects(body: object, events: tuple[Any, ...]) -> None:
    """Whenever the client disconnects, the ticket is left exactly once, and later events do no harm."""
    desk = FakeDesk(scripted(*events))
    async with Client(make_app(desk)).open("POST", PATH, body) as exchange:
        await trio.testing.wait_all_tasks_blocked()
        assert desk.ticket.num_leaves == 0
        exchange.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert desk.ticket.num_leaves == 1
        desk.ticket.mailbox.put(Delta(0, "late", 1, None))
        desk.ticket.mailbox.put(Closed(record(), None))
    assert desk.ticket.num_leaves == 1


async def test_client_that_does_not_read() -> None:
    """A full backlog ends the request: the stream is cut off, and its ticket is left at once."""
    desk = FakeDesk(scripted(STARTED))
    app = make_app(desk, AppOptions(sink_limit_bytes=2000))
    async with Client(app, buffer=0).open("POST", PATH, STREAM) as exchange:
        await exchange.wait_started()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(30):
            desk.ticket.mailbox.put(Delta(0, "x" * 50, 1, None))
            await trio.testing.wait_all_tasks_blocked()
        assert desk.ticket.num_leaves == 1
        with pytest.raises(trio.EndOfChannel):
            await exchange.read_some()
        assert not exchange.ended


async def test_heartbeat(autojump_clock: trio.testing.MockClock) -> None:
    """Silence is filled with comments, before the first token and between tokens."""
    desk = FakeDesk(scripted(STARTED))
    app = make_app(desk, AppOptions(heartbeat_s=15.0))
    async with Client(app).open("POST", PATH, STREAM) as exchange:
        await exchange.wait_started()
        begun = trio.current_time()
        assert await exchange.read_some() == b": ping\n\n"
        assert await exchange.read_some() == b": ping\n\n"
        assert trio.current_time() - begun == pytest.approx(30.0)
        desk.ticket.mailbox.put(Delta(0, "a", 1, None))
        assert b'"a"' in await exchange.read_some()
        assert await exchange.read_some() == b": ping\n\n"
        desk.ticket.mailbox.put(Closed(record(), None))
        assert await exchange.read() == b"data: [DONE]\n\n"


WAITING = (
    (PATH, STREAM),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}),
)


@pytest.mark.parametrize(("path", "body"), WAITING)
async def test_stream_that_waits_in_the_queue(
    path: str, body: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """The client gets the head and a heartbeat in time, and later the same events as one that did not wait."""
    async with Client(make_app(FakeDesk())).open("POST", path, body) as exchange:
        await exchange.wait_started()
        at_once = events_of(await exchange.read())
    desk = FakeDesk(scripted())
    async with Client(make_app(desk, AppOptions(heartbeat_s=15.0))).open("POST", path, body) as exchange:
        assert await exchange.wait_started() == 200
        assert trio.current_time() == pytest.approx(15.0)
        assert b"ping" in (first := await exchange.read_some())
        assert await exchange.read_some() == first
        assert trio.current_time() == pytest.approx(30.0)
        for event in hello():
            desk.ticket.mailbox.put(event)
        late = events_of(await exchange.read())
    assert [event.keys() for event in late] == [event.keys() for event in at_once] and desk.ticket.num_leaves == 1


@pytest.mark.parametrize(("path", "body"), WAITING)
async def test_refusal_of_a_stream_that_waited(
    path: str, body: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """A refusal has its own status before the first heartbeat, and is an error event in the API's shape after it."""
    for wait_s in (14.0, 16.0):
        desk = FakeDesk(scripted())
        async with Client(make_app(desk, AppOptions(heartbeat_s=15.0))).open("POST", path, body) as exchange:
            await trio.sleep(wait_s)
            desk.ticket.mailbox.put(failure(ErrorKind.TIMEOUT, "too long"))
            status, data = await exchange.wait_started(), await exchange.read()
        assert status == (504 if wait_s < 15 else 200)
        assert (b"ping" in data) == (wait_s > 15) and b"too long" in data and b"timeout_error" in data
        assert (b"event: error\n" in data) == (wait_s > 15 and path in ("/v1/messages", "/v1/responses"))
        assert data.endswith(b"data: [DONE]\n\n") == (wait_s > 15 and "completions" in path)


@pytest.mark.parametrize(("path", "body"), WAITING)
async def test_stream_that_waits_for_the_tokenizer(
    path: str, body: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """While a request waits for the tokenizer, its client gets the same as one whose request waits in the queue."""
    async with Client(make_app(FakeDesk())).open("POST", path, body) as exchange:
        await exchange.wait_started()
        at_once = events_of(await exchange.read())
    desk = FakeDesk(gate=trio.Event())
    async with Client(make_app(desk, AppOptions(heartbeat_s=15.0))).open("POST", path, body) as exchange:
        assert await exchange.wait_started() == 200
        assert trio.current_time() == pytest.approx(15.0)
        assert b"ping" in (first := await exchange.read_some())
        assert await exchange.read_some() == first and desk.ticket.num_starts == 0
        assert desk.gate is not None
        desk.gate.set()
        late = events_of(await exchange.read())
    assert [event.keys() for event in late] == [event.keys() for event in at_once]
    assert (desk.ticket.num_starts, desk.ticket.num_leaves) == (1, 1)


@pytest.mark.parametrize(("path", "body"), WAITING)
async def test_failure_after_waiting_for_the_tokenizer(
    path: str, body: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """A failure has its own status before the first heartbeat, and ends the stream with an error after it."""
    for wait_s in (14.0, 16.0):
        desk = FakeDesk(gate=trio.Event(), start_error=RuntimeError("a secret"))
        async with Client(make_app(desk, AppOptions(heartbeat_s=15.0))).open("POST", path, body) as exchange:
            await trio.sleep(wait_s)
            assert desk.gate is not None
            desk.gate.set()
            status, data = await exchange.wait_started(), await exchange.read()
        assert status == (500 if wait_s < 15 else 200) and exchange.ended
        assert (b"ping" in data) == (wait_s > 15) and b"error" in data and b"secret" not in data
        assert desk.ticket.num_leaves == 1


async def test_client_that_leaves_while_it_waits_for_the_tokenizer(autojump_clock: trio.testing.MockClock) -> None:
    """If a client leaves, before or after the head, its request is left and never reaches the tokenizer."""
    for wait_s in (14.0, 16.0):
        desk = FakeDesk(gate=trio.Event())
        async with Client(make_app(desk, AppOptions(heartbeat_s=15.0))).open("POST", PATH, STREAM) as exchange:
            await trio.sleep(wait_s)
            exchange.leave()
            await trio.testing.wait_all_tasks_blocked()
            assert desk.ticket.num_leaves == 1
            assert desk.gate is not None
            desk.gate.set()
            await trio.testing.wait_all_tasks_blocked()
        assert desk.ticket.num_starts == 0
