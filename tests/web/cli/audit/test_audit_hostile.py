"""Whatever a server sends, an audit ends, says what came, and never raises."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import httpx2
import pytest
import trio

from quipu.web.cli.audit.audit_report import describe, render_table
from quipu.web.cli.audit.probing import NothingToAudit
from quipu.web.cli.audit.request_body import Target
from quipu.web.cli.audit.verdicts import Verdict
from tests.web.cli.audit.fake_audits import URL, audit, audit_until, verdicts_of
from tests.web.cli.audit.fake_server import Body, FakeServer, Truth

Pieces = Callable[[], AsyncIterator[bytes]]


@attrs.define(eq=False)
class Hostile(httpx2.AsyncBaseTransport):
    """Answers everything in one way."""

    pieces: Pieces
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    num_requests: int = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.num_requests += 1
        return httpx2.Response(self.status, headers=self.headers, stream=Body(self.pieces(), lambda: None))


def one(content: Any) -> Pieces:
    async def pieces() -> AsyncIterator[bytes]:
        yield content if isinstance(content, bytes) else json.dumps(content).encode()

    return pieces


def endless(piece: bytes, pause_s: float = 0.0) -> Pieces:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield piece
            await trio.sleep(pause_s)

    return pieces


async def silent() -> AsyncIterator[bytes]:
    await trio.sleep_forever()
    yield b""


CHAT = {"apis": ("chat",)}
NAMED = {"target": Target(URL, "m"), "apis": ("chat",), "timeout_s": 30.0}


@pytest.mark.parametrize(
    ("hostile", "complaint"),
    [
        (Hostile(silent), "timeout"),
        (Hostile(endless(b"x", 1.0)), "timeout"),
        (Hostile(endless(b"x" * (1 << 20))), "too_large"),
        (Hostile(one(b"[" * 100_000)), "not_json"),
        (Hostile(one(b'{"usage": NaN}')), "not_json"),
        (Hostile(one(b"\x00\xff\x1b[2J")), "not_json"),
        (Hostile(one([])), "no_answer"),
        (Hostile(one({"usage": {}, "choices": {}})), "no_answer"),
        (Hostile(one(b""), 302, {"location": "http://elsewhere/\x1b"}), "http_302"),
        (Hostile(one({"error": [[[]]]}), 500), "http_500"),
        (Hostile(endless(b"x" * 70_000), 500), "too long"),
        (Hostile(one(b"?"), 200, {"content-encoding": "gzip"}), "compressed"),
    ],
)  # fmt: skip
def test_no_answer_is_told(hostile: Hostile, complaint: str) -> None:
    """A server from which nothing can be learned ends the audit at once, with what it did, in a printable line."""
    with pytest.raises(NothingToAudit, match=complaint) as ended:
        audit(hostile, **NAMED)
    assert str(ended.value).isprintable()
    assert hostile.num_requests <= 4


def chunks(usage: Any) -> Pieces:
    """Answer as a whole response and as a stream, which is one line of JSON in either case."""
    return one({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": usage})


NO_COUNTS: tuple[Any, ...] = (-1, 1e300, 2**70, 0.5, "7", True, [], {}, [[[1]]])
NO_DETAILS: dict[str, Any] = {"prompt_tokens": None, "prompt_tokens_details": []}
NO_USAGES: tuple[Any, ...] = ([], "usage", 7, NO_DETAILS, {"prompt_tokens": {}})


@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": value}} for value in NO_COUNTS] + [*NO_USAGES],
)
def test_counts_of_any_type(usage: Any) -> None:
    """What stands in place of a count ends no audit; what is no count is called false."""
    outcome = audit(Hostile(chunks(usage)), **NAMED)
    false = verdicts_of(outcome, Verdict.FALSE)
    assert ("counts" in false) == (usage != NO_DETAILS)
    assert render_table(describe(outcome, 1.0)).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "pieces",
    [
        endless(b": ping\n\n", 0.5),
        endless(b"data: {}\n\n" * 100),
        endless(b"data: x" * 100),
        endless(b'data: {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}}\n\n', 0.1),
        one(b'data: {"choices": 7, "error": {"message": {"message": []}}}\n\n'),
        one(b"data: [DONE]\n\n" * 1000),
        one(b'data: {"type": {}, "choices": [null, 3, {"delta": 1, "index": []}]}\n\n'),
    ],
)
def test_streams_of_any_kind(pieces: Pieces) -> None:
    """A server whose streams never end, drip or mean nothing is audited for the rest, within the deadlines."""

    class OddStreams(FakeServer):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if b'"stream":true' in request.content:
                return httpx2.Response(200, stream=Body(pieces(), lambda: None))
            return await super().handle_async_request(request)

    outcome = audit(OddStreams(), **NAMED | {"prompt_tokens": 150})
    assert verdicts_of(outcome, Verdict.TRUE)["cold"][0].is_stream is False


def test_budget_is_kept() -> None:
    """An audit never takes more tokens than its budget, as the server counts them, and says that it ended early."""
    server = FakeServer()
    outcome = audit(server, budget=20_000)
    assert 10_000 < server.num_tokens <= 20_000
    assert abs(outcome.spent - server.num_tokens) < 100
    assert outcome.stopped == "the budget of 20000 tokens is spent"


def test_slow_servers() -> None:
    """A list of models that drips ends within half a minute, an audit within its time."""
    with pytest.raises(NothingToAudit, match="GET http://fake/v1/models"):
        audit(Hostile(endless(b"x", 20.0)), **CHAT)
    outcome = audit(FakeServer(Truth(prefill_s=0.1)), **CHAT, max_time_s=100.0)
    assert outcome.stopped == "100 s are over" and outcome.num_requests < 20


@pytest.mark.parametrize("end_s", [0.7, 2.0, 4.5])
def test_nothing_is_left_open(end_s: float) -> None:
    """An audit that is interrupted, whatever it was doing, leaves no request open."""
    server = FakeServer()
    assert audit_until(end_s, server, concurrency=6, **CHAT) is None
    assert server.num_requests > 1 and server.num_open == 0


def test_server_that_stops_answering() -> None:
    """After three requests in a row without an answer nothing more is sent, and the rest is unknown."""

    class Dying(FakeServer):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if self.num_requests > 20:
                self.most_open += 1
                await trio.sleep_forever()
            return await super().handle_async_request(request)

    server = Dying()
    outcome = audit(server, **NAMED)
    assert outcome.stopped == "the server no longer answers: timeout: no end within 30 s"
    assert server.most_open <= 1 + 6
    assert not verdicts_of(outcome, Verdict.FALSE)
