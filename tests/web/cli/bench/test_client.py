"""One request over a real socket: whatever server and network do, it has exactly one outcome of a known kind."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import pytest

from quipu.web.cli.bench.answer import Outcome, ReportedUsage
from quipu.web.cli.bench.client import Target, open_client
from quipu.web.cli.bench.workload import Ask
from tests.web.cli.bench.bench_server import DONE, BenchServer, Reply, bench_server, good_reply, text_event, usage_event

ASK = Ask({"prompt": [1, 2, 3], "max_tokens": 7})


def target_of(url: str, **settings: Any) -> Target:
    fields: dict[str, Any] = {"headers": {}, "fields": {"model": "m"}, "extra_fields": {}, "timeout_s": 60.0}
    return Target(url=f"{url}/v1/completions", **{**fields, **settings})


def ask_of(reply: Reply, num: int = 1, backend: str = "trio", **settings: Any) -> tuple[list[Outcome], BenchServer]:
    """Send `num` requests, one after another, to a server that answers each with `reply`."""

    async def main() -> tuple[list[Outcome], BenchServer]:
        async with bench_server(lambda request: reply, pause_s=0.002) as server:
            async with open_client(target_of(server.url, **settings)) as client:
                with anyio.fail_after(90):
                    return [await client.ask(ASK) for _ in range(num)], server

    return anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_good_answer(backend: str) -> None:
    """On both event loops times are in order, usage is that of the server, and later requests use the same
    connection. (One read may bring several pieces.)"""
    outcomes, server = ask_of(good_reply(), num=2, backend=backend)
    for outcome in outcomes:
        assert outcome.failure is None
        assert outcome.text == "one two"
        assert outcome.usage == ReportedUsage(100, 2, 32)
        assert outcome.started_s < outcome.output_at_s[0] <= outcome.output_at_s[-1] <= outcome.ended_s
    assert outcomes[0].ended_s <= outcomes[1].started_s
    assert server.most_open == 1


def test_request_fields_and_headers() -> None:
    """Requests stream with usage; fields of a single request override common ones, and extra fields override all;
    headers are sent."""
    _, server = ask_of(
        good_reply(),
        headers={"Authorization": "Bearer k", "X-Tenant": "a"},
        fields={"model": "m", "temperature": 0.5},
        extra_fields={"temperature": 1.0, "max_tokens": 9, "cache_salt": "s"},
    )
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "temperature": 1.0,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["x-tenant"] == "a"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["content-type"] == "application/json"


def split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def test_pieces_of_any_size() -> None:
    """An event may arrive with others in one read, and a character in several."""
    body = text_event("wörd ") + text_event("🪢", "stop") + usage_event(5, 2, cached_tokens=0) + DONE
    body = body.replace(b"\\u00f6", "ö".encode()).replace(b"\\ud83e\\udea2", "🪢".encode())
    for pieces in ([body], split(body, 7)):
        (outcome,), _ = ask_of(Reply(pieces=pieces))
        assert outcome.failure is None
        assert outcome.text == "wörd 🪢"
        assert outcome.usage == ReportedUsage(5, 2, 0)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Reply(400, "application/json", [b'{"error": {"message": "no `tools`"}}']), "http_400", "no `tools`"),
        (Reply(422, "application/json", [b'{"detail": "x"}']), "http_422", "{'detail': 'x'}"),
        (Reply(503, "text/plain", [b"come back"]), "http_503", "come back"),
        (Reply(500, "text/html", []), "http_500", ""),
        (Reply(307, "text/html", []), "http_307", ""),
        (Reply(200, "application/json", [b'{"choices": []}']), "not_a_stream", "'application/json': {'choices': []}"),
        (Reply(pieces=[text_event("one")], is_cut=True), "stream_cut", "incomplete chunked read"),
        (Reply(pieces=[text_event("one")]), "stream_ended_early", "without a finish reason"),
        (Reply(pieces=[]), "stream_ended_early", "without a finish reason"),
        (Reply(is_cut=True), "disconnected", "incomplete chunked read"),
        (Reply(pieces=[b'data: {"error": {"message": "engine died"}}\n\n']), "error_event", "engine died"),
    ],
)
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_failures_have_kinds(backend: str, reply: Reply, kind: str, message: str) -> None:
    """Each failure is an outcome with the server's own message, not an exception; the next request is unaffected."""
    outcomes, _ = ask_of(reply, num=2, backend=backend)
    for outcome in outcomes:
        assert outcome.failure is not None
        assert outcome.failure.kind == kind
        assert message in outcome.failure.message


def test_hanging_server() -> None:
    """A request that takes too long fails as `timeout`."""
    (outcome,), _ = ask_of(Reply(pieces=[text_event("one")], hangs=True), timeout_s=0.2)
    assert outcome.failure is not None and outcome.failure.kind == "timeout"


def test_server_that_stays_after_done() -> None:
    """After `[DONE]` a response is complete, whether or not its body ends, and its end is the time of `[DONE]`."""
    (outcome,), _ = ask_of(Reply(pieces=[text_event("one", "stop"), DONE], hangs=True))
    assert outcome.failure is None
    assert outcome.ended_s - outcome.started_s < 30, "the client must not wait for the end of the body"


@pytest.mark.parametrize("host", ["127.0.0.1", "name.invalid"], ids=["refused", "unknown"])
def test_no_server(host: str) -> None:
    """A refused connection and an unknown name fail as `connect`."""

    async def main(url: str) -> Outcome:
        async with open_client(target_of(url)) as client:
            return await client.ask(ASK)

    with socket.socket() as not_listening:
        not_listening.bind(("127.0.0.1", 0))
        outcome = anyio.run(main, f"http://{host}:{not_listening.getsockname()[1]}", backend="trio")
    assert outcome.failure is not None and outcome.failure.kind == "connect"
    assert outcome.failure.message
