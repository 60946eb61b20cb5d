"""Upstreams that send what no well-meaning server does: only their own requests fail."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import httpx2
import pytest
import structlog.testing
import trio

from quipu.actors.fleet import upstream_probes
from quipu.actors.fleet.upstream_http import upstream_client
from quipu.actors.fleet.upstreams.answers import MAX_CHOICES, Choice
from quipu.actors.fleet.upstreams.relay import Ends
from quipu.actors.messages.counts import UNKNOWN
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.request_desk import upstream_pool
from quipu.web.options import AppOptions
from tests.upstreams import ASK, CHAT, USAGE, Answering, Asked, Script, chunk, hello, open_fake, whole

HEADERS = {
    "redirect without a host": "location: //p@/x\r\n",
    "redirect elsewhere": "location: http://127.0.0.1:9/\r\n",
    "cookie in Latin-1": "set-cookie: caf\u00e9=1; path=/\r\n",
    "cookie": "set-cookie: a=1; path=/\r\n",
    "content type of bytes": "content-type: \u00ff\u00fe\r\n",
    "retry of bytes": "retry-after: \u00ff\r\n",
    "encoding of bytes": "content-encoding: \u00ff\r\n",
    "length twice": "content-length: 1\r\ncontent-length: 2\r\n",
    "length that is none": "content-length: -1\r\n",
    "no header": "nothing\r\n",
    "head without end": "x: " + "y" * 100_000,
    "many headers": "x: y\r\n" * 20_000,
    "empty name": ": y\r\n",
    "null": "x: \x00\r\n",
}


def with_head(status: str, headers: str, body: bytes = b"{}") -> Script:
    async def script(asked: Asked, answering: Answering) -> None:
        head = f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n"
        await answering.stream.send_all(head.encode("latin-1") + body)
        if not headers.endswith("\r\n"):
            await answering.left.wait()

    return script


@pytest.mark.parametrize("status", ["200 OK", "302 Found", "400 Bad", "101 Switching", "2xx No", "700 \u00ff"])
async def test_heads(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Whatever head an upstream sends to a request or a probe, the server and its other upstream go on serving."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.005)
    monkeypatch.setattr(upstream_pool, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(upstream_pool, "MAX_BACKOFF_S", 0.005)
    with structlog.testing.capture_logs() as lines:
        async with open_fake(hello, hello) as (served, (hostile, well)):
            for headers in HEADERS.values():
                hostile.script = with_head(status, headers)
                hostile.probe, before = None, hostile.num_probes
                # A probe sends two requests: after three more, none that got the previous head is in flight.
                while hostile.num_probes < before + 3 or not all(upstream.is_ready for upstream in served.pool):
                    await trio.sleep(0.001)
                num_asked = len(hostile.asked)
                answers = [await served.ask() for _ in range(2)]
                assert {answer.status_code for answer in answers} <= {200, 400}
                assert len(hostile.asked) > num_asked
                hostile.probe, before = hostile.script, hostile.num_probes
                while hostile.num_probes < before + 2:
                    await trio.sleep(0.001)
            hostile.script = hello
            assert (await served.ask()).status_code == 200
            assert not any("cookie" in asked.headers for asked in (*hostile.asked, *well.asked))
    assert not [line for line in lines if "crashed" in line["event"]]


async def test_longer_body_is_nobody_elses_answer() -> None:
    """Data after a response is discarded together with the connection."""

    async def script(asked: Asked, answering: Answering) -> None:
        body = json.dumps(whole(content="for A")).encode()
        if b"question of A" not in asked.body:
            await hello(asked, answering)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        await answering.stream.send_all((head + body) + (head + body.replace(b"for A", b"SECRET")))

    async with open_fake(script) as (served, _):
        for question in ("question of A", "question of B") * 3:
            answer = await served.ask(messages=[{"role": "user", "content": question}])
            content = answer.json()["choices"][0]["message"]["content"]
            assert content == ("for A" if question.endswith("A") else "Hello there")


async def test_comments_reach_the_client() -> None:
    """Comments reach the client at once, as comments, wherever they are and even if no empty line follows."""
    go_on = trio.Event()

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.send(b": in the queue\n\n: line\n")
        await go_on.wait()
        await answering.send(b":\n\n: \xff\n" + b"data: " + json.dumps(chunk("Hi", "stop")).encode() + b"\n: in it\n\n")
        await answering.event(b"[DONE]")
        await answering.end()

    async with open_fake(script) as (served, _):
        text = ""
        async with served.client.stream("POST", CHAT, json=ASK | {"stream": True}) as response:
            async for part in response.aiter_text():
                text += part
                if ": line" in text:
                    assert go_on.is_set() or "data:" not in text
                    go_on.set()
        assert text.startswith(": in the queue\n\n: line\n\n:\n\n: \ufffd\n\n")
        assert [line for line in text.split("\n") if line.startswith("data:")] == [
            "data: " + json.dumps(chunk("Hi", "stop")),
            "data: [DONE]",
        ]
        assert ": in it\n\n" in text and (await served.record()).outcome is Outcome.FINISHED


async def test_comments_and_no_answer() -> None:
    """If an upstream has sent only comments, another one is asked; if there is none, the stream ends with an error."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.send(b": soon\n\n")
        await answering.cut()

    async with open_fake(script, script) as (served, fakes):
        response = await served.ask(stream=True)
        events = [event for event in response.text.split("\n\n") if event]
        assert response.status_code == 200 and events[:2] == [": soon", ": soon"] and events[3] == "data: [DONE]"
        assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "upstream_error"
        assert [len(fake.asked) for fake in fakes] == [1, 1]
        record = await served.record()
        assert (record.outcome, record.admitted_at, record.fault) == (Outcome.FAILED, None, None)


@pytest.mark.parametrize("status", [200, 400])
async def test_stream_that_waits_for_its_upstream(status: int) -> None:
    """The client gets heartbeats while its upstream sends nothing; a later refusal is an error event."""
    go_on = trio.Event()

    async def script(asked: Asked, answering: Answering) -> None:
        await go_on.wait()
        await (hello(asked, answering) if status == 200 else answering.whole(b"{}", status))

    async with open_fake(script, options=AppOptions(heartbeat_s=0.01)) as (served, _):
        text = ""
        async with served.client.stream("POST", CHAT, json=ASK | {"stream": True}) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                text += part
                if text.startswith(": ping\n\n"):
                    go_on.set()
        assert text.endswith("data: [DONE]\n\n") and ('"error"' in text) == (status == 400)
        assert (await served.record()).outcome is (Outcome.FINISHED if status == 200 else Outcome.REJECTED)


@pytest.mark.parametrize(
    "sent",
    [
        b"data: [DONE]\n\n",
        b"",
        b": nothing\n\ndata: [DONE]\n\n",
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\ndata: [DONE]\n\n',
        b'data: {"choices":[{"index":-1,"finish_reason":"stop"}]}\n\n',
        b'data: {"object":"chat.completion.chunk"}\n\ndata: [DONE]\n\n',
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\ndata: [DONE]\n\n',
    ],
    ids=["done", "nothing", "comment", "usage", "index", "no choices", "no reason"],
)
async def test_stream_without_an_answer(sent: bytes) -> None:
    """A stream in which no choice has ended is a failure, whatever else it contains."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        if sent:
            await answering.send(sent)
        await answering.end()

    async with open_fake(script) as (served, _):
        response = await served.ask(stream=True)
        assert response.status_code == 502 or '"error"' in response.text
        assert (await served.record()).outcome is Outcome.FAILED


@pytest.mark.parametrize("body", [b"{}", b'{"choices":[]}', b'{"choices":null,"usage":{"prompt_tokens":3}}'])
async def test_whole_response_without_an_answer(body: bytes) -> None:
    """A response without a choice is a 502."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.whole(body)

    async with open_fake(script) as (served, _):
        assert (await served.ask()).status_code == 502


@pytest.mark.parametrize("usage", [b'"\xff"', b'{"prompt_tokens":' + b"9" * 5000 + b"}", b'{"a":1e999}', b"[" * 5000])
async def test_usage_that_cannot_be_read(usage: bytes) -> None:
    """If the usage cannot be read, the answer is passed on without it or is a 502; the record's counts are unknown."""

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.whole(json.dumps(whole(None)).encode()[:-1] + b',"usage":' + usage + b"}")

    with structlog.testing.capture_logs() as lines:
        async with open_fake(script) as (served, _):
            assert (await served.ask()).status_code in (200, 502)
            assert (await served.record()).prompt == UNKNOWN
    assert not [line for line in lines if "crashed" in line["event"]]


async def test_finish_reasons_are_not_kept() -> None:
    """Long finish reasons of many choices are not kept in memory."""
    ends = Ends()
    tracemalloc.start()
    for index in range(MAX_CHOICES):
        ends.note([Choice(index, "x" * 100_000)])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000 and ends.num_choices == MAX_CHOICES
    reason = "x" * 100_000

    async def script(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        for index in range(40):
            choice = {"index": index, "delta": {}, "finish_reason": reason}
            await answering.event({"choices": [choice]})
        await answering.event(b"[DONE]")
        await answering.end()

    async with open_fake(script) as (served, _):
        async with served.client.stream("POST", CHAT, json=ASK | {"stream": True}) as response:
            async for _part in response.aiter_raw():
                pass
        record = await served.record()
        assert (record.outcome, record.num_choices, record.finish_reason) == (Outcome.FINISHED, 40, None)


@pytest.mark.parametrize("status", [400, 429])
async def test_compressed_refusal(status: int) -> None:
    """A compressed refusal is decompressed, or the client gets an error that says that it cannot be read."""
    body = b'{"error":{"message":"no such field"}}'

    def compressed(data: bytes, encoding: str) -> Script:
        async def script(asked: Asked, answering: Answering) -> None:
            await answering.whole(data, status, f"content-encoding: {encoding}\r\n")

        return script

    async with open_fake(compressed(gzip.compress(body), "gzip")) as (served, (fake,)):
        answer = await served.ask()
        assert (answer.status_code, answer.content) == (status, body)
        fake.script = compressed(gzip.compress(bytes(1_000_000)), "GZIP")
        assert (await served.ask()).content == bytes(64 * 1024), "it must be cut like any other refusal"
        for encoding in ("gzip", "br", "gzip, br", "\xff"):
            fake.script = compressed(bytes(70_000), encoding)
            answer = await served.ask()
            assert answer.status_code == status and "cannot be read" in answer.json()["error"]["message"]
            assert "content-encoding" not in answer.headers


async def test_own_shortage_is_not_the_upstreams_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this server has no descriptor left, a request gets a 503, and the upstream stays in use."""
    monkeypatch.setattr(upstream_client, "SHORTAGE_S", 0.01)
    monkeypatch.setattr(upstream_client, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.02)

    connect, num_refused = trio.open_tcp_stream, 0

    async with open_fake() as (served, _):
        (upstream,) = served.pool

        async def open_no_other(host: str, port: int, **options: Any) -> trio.SocketStream:
            nonlocal num_refused
            if str(port) in upstream.url:
                num_refused += 1
                raise OSError("all attempts to connect failed") from ExceptionGroup("", [OSError(24, "Too many files")])
            return await connect(host, port, **options)

        with monkeypatch.context() as short:
            short.setattr(trio, "open_tcp_stream", open_no_other)
            answer = await served.ask()
            assert answer.status_code == 503 and "retry-after" in answer.headers
            before = num_refused
            while num_refused == before:
                await trio.sleep(0.002)
            await trio.sleep(0.05)
            assert upstream.is_ready and not upstream.num_deaths
        assert (await served.ask()).status_code == 200


@pytest.mark.parametrize("timeout_s", [None, 100.0])
async def test_answers_probes_only(monkeypatch: pytest.MonkeyPatch, timeout_s: float | None) -> None:
    """An upstream that answers probes but no request is given up, unless the request has a deadline."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.01)

    async def silent(asked: Asked, answering: Answering) -> None:
        monkeypatch.setattr(upstream_probes, "MAX_SILENCE_S", 0.05)
        await answering.left.wait()

    async with open_fake(silent, options=AppOptions(request_timeout_s=timeout_s)) as (served, (fake,)):
        if timeout_s is None:
            answer = await served.ask()
            assert answer.status_code == 502 and "too long" in answer.json()["error"]["message"]
            await fake.answerings[0].left.wait()
        else:
            with trio.move_on_after(0.3):
                pytest.fail(str(await served.ask()))


async def test_health_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health endpoints do not name the upstreams' addresses; the admin API does."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.01)
    async with open_fake() as (served, (fake,)):
        fake.is_healthy = False
        await _until_down(served.client)
        for path in ("/health", "/ready", "/ping"):
            assert "127.0.0.1" not in (await served.client.get(path)).text
        assert fake.url in (await served.client.get("/v1/admin/engines")).text


async def _until_down(client: httpx2.AsyncClient) -> None:
    while (await client.get("/health")).status_code == 200:
        await trio.sleep(0.005)


async def test_lists_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable list of models changes nothing, and an impossible length is ignored."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.01)
    lists = [b'{"data":[{"id":"\xff"}]}', b'{"data":[{"id":"far","max_model_len":%d}]}' % 10**30, b"[" * 9000, b"\xff"]

    async with open_fake() as (served, (fake,)):
        for listed in lists:

            async def answer_probe(asked: Asked, answering: Answering, listed: bytes = listed) -> None:
                await answering.whole(listed)

            fake.probe, before = answer_probe, fake.num_probes
            while fake.num_probes < before + 3:
                await trio.sleep(0.002)
            models = await served.client.get("/v1/models")
            assert models.status_code == 200 and [model["id"] for model in models.json()["data"]] == ["far"]
            assert (await served.ask()).json()["usage"] == USAGE
