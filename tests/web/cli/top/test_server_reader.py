"""`quipu top` reads any server within bounds, and says what it was refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
import trio

from quipu.web.cli.top import server_reader
from quipu.web.cli.top.figures import Reading
from quipu.web.cli.top.server_reader import NotReachable, ServerReader, make_client, number, word

HEALTH = {"status": "ok", "state": "ready", "detail": ""}
METRICS = b'quipu:ledger_info{server="a"} 1.0\nquipu:num_requests_running 3.0\n'


class Body(httpx2.AsyncByteStream):
    def __init__(self, *pieces: bytes, is_endless: bool = False, hangs: bool = False) -> None:
        self.pieces, self.is_endless, self.hangs = pieces, is_endless, hangs
        self.num_sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            for piece in self.pieces:
                self.num_sent += len(piece)
                yield piece
            if self.hangs:
                await trio.sleep_forever()
            if not self.is_endless:
                return


Answer = Callable[[str], httpx2.Response]


class Scripted(httpx2.AsyncBaseTransport):
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.keys: list[str | None] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.keys.append(request.headers.get("authorization"))
        return self.answer(request.url.path)


def answered(content: object, status: int = 200) -> httpx2.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx2.Response(status, stream=Body(body))


def fine(path: str) -> httpx2.Response:
    if path == "/metrics":
        return answered(METRICS)
    if path == "/v1/admin/engines":
        return answered({"engines": [{"id": 0, "state": "ready"}, 7], "upstreams": "none"})
    return answered(HEALTH if path == "/health" else {"data": [{"tenant": "acme"}], "window_s": 60})


def but(path: str, make: Callable[[], httpx2.Response]) -> Answer:
    """Return a server that is fine but for one path."""
    return lambda asked: make() if asked == path else fine(asked)


async def read(answer: Answer) -> Reading:
    async with make_client({}, Scripted(answer)) as http:
        return await ServerReader(http, "http://test").read()


async def test_reading() -> None:
    """Everything that a server shows is in a reading; rows that are none are left out."""
    reading = await read(fine)
    assert reading.state == "ready" and reading.samples is not None and not reading.refusals
    assert reading.samples.total("num_requests_running") == 3
    assert reading.engines == ({"id": 0, "state": "ready"},) and reading.upstreams == ()
    assert reading.tenants == ({"tenant": "acme"},) and reading.tenants_window_s == 60


@pytest.mark.parametrize("status", [401, 403])
async def test_key_of_a_tenant(status: int) -> None:
    """Without an admin key there is the health, and the tenant's own cache; the reason is said once."""
    answer: dict[str, Any] = {"/metrics": None, "/v1/admin/engines": None}
    reading = await read(lambda path: answered({}, status) if path in answer else fine(path))
    assert reading.state == "ready" and reading.samples is None and reading.tenants == ({"tenant": "acme"},)
    assert len(reading.refusals) == 1 and "QUIPU_ADMIN_KEY" in reading.refusals[0]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/cache/stats"])
async def test_server_that_hangs(autojump_clock: trio.abc.Clock, path: str) -> None:
    """No answer takes longer than the patience, even if some of it has come."""
    began = trio.current_time()
    with pytest.raises(NotReachable, match="no answer within 5 s"):
        await read(but(path, lambda: httpx2.Response(200, stream=Body(b"{", hangs=True))))
    assert trio.current_time() - began == server_reader.PATIENCE_S


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/admin/engines"])
async def test_server_without_end(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """An answer that is too long is read no further."""
    monkeypatch.setattr(server_reader, "MAX_BYTES", 1 << 20)
    body = Body(bytes(1 << 16), is_endless=True)
    with pytest.raises(NotReachable, match=f"{path} is larger than 1 MiB"):
        await read(but(path, lambda: httpx2.Response(200, stream=body)))
    assert body.num_sent <= (1 << 20) + (1 << 16)


async def test_compressed_answers() -> None:
    """They are refused unread: they might unpack to any size."""
    with pytest.raises(NotReachable, match="compressed"):
        await read(
            but("/metrics", lambda: httpx2.Response(200, headers={"content-encoding": "gzip"}, stream=Body(b"")))
        )


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"state": 3}', b"\xff", b'{"status": "ok"}'])
async def test_another_server(content: bytes) -> None:
    """What has no health of quipu's is named as another server."""
    with pytest.raises(NotReachable, match="/health is not that of quipu"):
        await read(but("/health", lambda: answered(content)))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"engines": [1], "data": {}, "window_s": "x"}', b"\xff"])
async def test_nonsense_elsewhere(content: bytes) -> None:
    """Nonsense at other paths is as good as nothing."""
    reading = await read(lambda path: fine(path) if path == "/health" else answered(content))
    assert reading.state == "ready" and not reading.engines and not reading.tenants
    reading = await read(but("/metrics", lambda: answered(b"<html>\n")))
    assert reading.refusals == ("/metrics is not in Prometheus' text format",)


async def test_words_of_a_server() -> None:
    """Nothing that a server says is obeyed by a terminal, and no word or number is too long for it."""
    hostile = json.dumps({"state": "re\x1b[2Jady" + "x" * 1000, "detail": "a\nb\x9b"}).encode()
    reading = await read(but("/health", lambda: answered(hostile)))
    assert reading.state.startswith("re?[2Jady") and len(reading.state) == 200 and reading.detail == "a b?"
    assert word(7) == "" and number("7") == number(True) == number(1e300) == 0 and number(7) == 7


async def test_key() -> None:
    """It is sent with every request."""
    transport = Scripted(fine)
    async with make_client({"Authorization": "Bearer k"}, transport) as http:
        await ServerReader(http, "http://test").read()
    assert transport.keys == ["Bearer k"] * 4
