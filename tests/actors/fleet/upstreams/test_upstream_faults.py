"""Upstreams that fail: another one is tried if the client has received nothing yet; otherwise its stream ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.fleet.upstreams import event_stream, relay
from quipu.actors.messages.counts import UNKNOWN
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.request_desk import upstream_pool
from quipu.web.options import AppOptions
from tests.upstreams import ASK, CHAT, Answering, Asked, Script, chunk, hello, open_fake, open_served, whole


def refuse(status: int, body: bytes = b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}') -> Script:
    async def script(asked: Asked, answering: Answering) -> None:
        await answering.whole(body, status, "retry-after: 7\r\n")

    return script


async def cut_at_once(asked: Asked, answering: Answering) -> None:
    await answering.cut()


async def cut_before_any_event(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.send(b": nothing yet\n\n")
    await answering.cut()


async def cut_in_mid_stream(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.cut()


async def end_without_an_end(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.end()


async def break_json(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.event(b'{"choices": [{')
    await answering.left.wait()


async def send_endless_event(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    while True:
        await answering.send(b"x" * 4096)


async def send_event_of_many_lines(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.send(b"data:\n" * 1000 + b"\n")
    await answering.left.wait()


async def send_two_usages(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.event(b'{"choices":[{}],"usage":{"prompt_tokens":1},"usage":null,"x":1}')
    await answering.left.wait()


async def say_error(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk("Hello "))
    await answering.event({"error": {"message": "its own words", "type": "server_error", "code": 500}})
    await answering.event(b"[DONE]")
    await answering.end()


@pytest.mark.parametrize(
    "script",
    [
        cut_in_mid_stream,
        end_without_an_end,
        break_json,
        send_endless_event,
        send_event_of_many_lines,
        send_two_usages,
        say_error,
    ],
    ids=lambda script: script.__name__,
)
async def test_failure_in_mid_stream(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """The client's stream ends with the API's error event, and no other upstream is asked."""
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 100_000)
    async with open_fake(script, script) as (served, fakes):
        events = await served.stream()
        assert events[0] == chunk("Hello ") and events[-1] == "[DONE]" and len(events) == 3
        assert set(events[1]) == {"error"} and events[1]["error"]["type"] == "server_error"
        if script is say_error:
            assert events[1]["error"]["message"] == "its own words"
        record = await served.record()
        assert (record.outcome, record.fault) == (Outcome.FAILED, Fault.ENGINE_DIED)
        assert record.prompt == UNKNOWN and not record.knows_completion
        assert sum(len(fake.asked) for fake in fakes) == 1


async def test_connection_that_is_cut_after_the_end() -> None:
    """A stream is complete with its last event, even if its connection is cut after that."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.event(chunk("Hello ", "stop"))
        await answering.event(b"[DONE]")
        await answering.cut()

    async with open_fake(script) as (served, _):
        assert await served.stream() == [chunk("Hello ", "stop"), "[DONE]"]
        assert (await served.record()).outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    "script",
    [cut_at_once, cut_before_any_event, refuse(500), refuse(503), refuse(401), refuse(403), refuse(302)],
    ids=["cut", "cut before any event", "500", "503", "401", "403", "302"],
)
async def test_another_is_tried_before_the_first_byte(script: Script) -> None:
    """The client notices nothing, and its record names the upstream that answered."""
    async with open_fake(script, hello) as (served, fakes):
        for _ in range(2):  # whichever is asked first
            events = await served.stream(stream_options={"include_usage": True})
            assert events[0]["choices"][0]["delta"]["content"] == "Hello "
        assert len(fakes[0].asked) >= 1 and len(fakes[1].asked) == 2
        assert {record.outcome for record in served.journal.closed} == {Outcome.FINISHED}
        assert {record.engine for record in served.journal.closed} == {1}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "status"),
    [(refuse(401), 502), (refuse(500), 502), (refuse(503), 503), (cut_at_once, 502)],
    ids=["401", "500", "503", "cut"],
)
async def test_no_other_upstream(script: Script, status: int, streams: bool) -> None:
    """The client gets a 502, or a 503 if it may try again, and is never told that a key is wrong."""
    async with open_fake(script) as (served, _):
        response = await served.ask(stream=streams)
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and "sk-" not in error["message"]
        record = await served.record()
        assert record.outcome is (Outcome.FAILED if status == 502 else Outcome.REJECTED)
        assert record.prompt == UNKNOWN and record.completion_tokens == 0 and record.admitted_at is None


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_refusals_are_passed_on(status: int, streams: bool) -> None:
    """An upstream's refusal of a request reaches its client unchanged, and no other upstream is asked."""
    async with open_fake(refuse(status), refuse(status)) as (served, fakes):
        response = await served.ask(stream=streams)
        assert (response.status_code, response.headers["retry-after"]) == (status, "7")
        assert response.json() == {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}
        assert (await served.record()).outcome is Outcome.REJECTED
        assert sum(len(fake.asked) for fake in fakes) == 1


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1]", b'"text"', b'{"choices": 3}', b'{"error": {}}', b"\xff", b"[" * 100_000],
    ids=["cut", "list", "text", "choices", "error", "bytes", "deep"],
)
async def test_invalid_whole_response(body: bytes) -> None:
    """A body that is not a response of the API is a 502."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.whole(body)

    async with open_fake(script) as (served, _):
        response = await served.ask()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")


async def test_whole_response_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless response is read up to a bound, and is a 502."""
    monkeypatch.setattr(relay, "MAX_WHOLE_BYTES", 100_000)

    async def endless(asked: Asked, answering: Answering) -> None:
        await answering.begin("application/json")
        while True:
            await answering.send(b"x" * 4096)

    async with open_fake(endless) as (served, (fake,)):
        assert (await served.ask()).status_code == 502
        await fake.answerings[0].left.wait()


async def test_error_without_end() -> None:
    """Only the beginning of a long refusal is passed on."""

    async def endless(asked: Asked, answering: Answering) -> None:
        await answering.stream.send_all(b"HTTP/1.1 400 Bad\r\ncontent-type: text/plain\r\n\r\n")
        while True:
            await answering.stream.send_all(b"x" * 4096)

    async with open_fake(endless) as (served, _):
        response = await served.ask()
        assert response.status_code == 400 and len(response.content) == 64 * 1024


async def test_json_for_a_stream() -> None:
    """A JSON answer to a request for a stream is a 502."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.whole(json.dumps(whole()).encode())

    async with open_fake(script) as (served, _):
        assert (await served.ask(stream=True)).status_code == 502


async def test_upstream_that_is_not_there() -> None:
    """A server whose upstream cannot be reached says so in its health, and answers 503 until it can."""
    async with open_served(UpstreamConfig(url="http://127.0.0.1:9"), names=("far",)) as served:
        health = (await served.client.get("/health")).json()
        assert health["state"] == "restarting" and "it cannot be reached" in health["detail"]
        response = await served.ask()
        assert response.status_code == 503 and "retry-after" in response.headers
        assert (await served.record()).outcome is Outcome.REJECTED


async def test_upstream_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream that is down gets no requests; once it answers a probe, it serves again."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.02)
    monkeypatch.setattr(upstream_pool, "FIRST_BACKOFF_S", 0.01)
    async with open_fake(hello, hello) as (served, (first, second)):
        first.is_healthy = False
        while sum(upstream.is_ready for upstream in served.pool) > 1:
            await trio.sleep(0.01)
        assert (await served.client.get("/health")).status_code == 200
        for _ in range(4):
            assert (await served.ask()).status_code == 200
        assert not first.asked and len(second.asked) == 4
        first.is_healthy = True
        while not all(upstream.is_ready for upstream in served.pool):
            await trio.sleep(0.01)
        for _ in range(4):
            await served.ask()
        assert first.asked


async def test_deadline() -> None:
    """A request that takes too long is ended here and at the upstream."""

    async def silent(asked: Asked, answering: Answering) -> None:
        await answering.left.wait()

    async with open_fake(silent, options=AppOptions(request_timeout_s=0.1)) as (served, (fake,)):
        num_asked = 0
        while not fake.answerings:  # its time may be over before the upstream gets it
            assert (await served.ask()).status_code == 504
            num_asked += 1
        await fake.answerings[0].left.wait()
        while len(served.journal.closed) < num_asked:
            await trio.sleep(0.002)
        assert {record.outcome for record in served.journal.closed} <= {Outcome.FAILED, Outcome.REJECTED}


async def test_full_journal_refuses_before_anything_is_counted() -> None:
    """If there is no room for its record, a request gets a 503, and no counter includes it."""
    async with open_fake() as (served, _):
        served.journal.has_room = lambda record: False
        assert (await served.ask()).status_code == 503
        assert served.counters().get("prompt_tokens_total", 0) == 0
        assert (await served.record()).prompt == UNKNOWN


async def test_key_is_shown_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    """An upstream's key is in no log line, no route's response and no representation."""
    async with open_fake(refuse(401)) as (served, _):
        await served.ask()
        shown: list[Any] = [[repr(upstream) for upstream in served.pool]]
        paths = ("/server_info", "/v1/admin/engines", "/metrics", "/health", "/v1/models")
        shown += [(await served.client.get(path)).text for path in paths]
        assert "127.0.0.1" in shown[1] and "upstreams" in shown[2] and "upstream_ready" in shown[3]
        assert "sk-of-the-upstream" not in str(shown) + capfd.readouterr().out


async def test_other_apis_say_that_they_are_not_passed_on() -> None:
    """Endpoints that not every OpenAI-compatible server has answer with an error in their own format."""
    async with open_fake() as (served, _):
        body = {"model": "far", "max_tokens": 5, "messages": ASK["messages"]}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await served.client.post(path, json=body)
            assert response.status_code == 400 and response.json()["type"] == "error"
            assert "another server" in response.json()["error"]["message"]
        response = await served.client.post("/v1/responses", json={"model": "far", "input": "a"})
        assert response.status_code == 400 and response.json()["error"]["code"] == "not_passed_on"
        assert (await served.client.post(CHAT, json=ASK | {"model": "none"})).status_code == 404
        assert (await served.client.post(CHAT, json=ASK | {"model": ["far"]})).status_code == 400
        models = (await served.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["far"]


async def test_names_of_the_operator() -> None:
    """`--served-model-name` gives the upstreams' model another name, which they do not see."""
    async with open_fake(names=("near",)) as (served, (fake,)):
        response = await served.ask(model="near")
        assert response.status_code == 200 and fake.asked[0].fields == ASK
        assert (await served.ask()).status_code == 404
        assert (await served.record()).model == "near"
