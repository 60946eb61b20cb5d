"""A full server: which connections are evicted, which are refused, and that probes always get a response."""

from __future__ import annotations

from contextlib import suppress

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from quipu.web.app import make_app
from quipu.web.http import connection_table
from tests.runtimes import eventually
from tests.web.fakes import FakeDesk, scripted
from tests.web.http.live import PATIENCE_S, UNHURRIED, Client, Probe, Running, get, post, probe_app, running_ours

FULL = attrs.evolve(UNHURRIED, max_connections=3, reserved_timeout_s=600)
SLOW_POST = post("/v1/completions", b'{"model": "demo"}')[:-3]


async def fill(server: Running, data: bytes, count: int = 3) -> list[Client]:
    """Open connections that are all accepted and have sent `data`."""
    clients = [await server.connect() for _ in range(count)]
    for client in clients:
        with suppress(trio.BrokenResourceError):  # the server has already evicted it
            await client.send(data)
    await trio.testing.wait_all_tasks_blocked(0.05)
    return clients


async def is_closed(client: Client) -> bool:
    with trio.fail_after(PATIENCE_S):
        return await client.read_all() == b""


async def test_probes_work_when_full() -> None:
    """With slow uploads on every connection, `/health` responds, and a request gets a 503 with Retry-After."""
    with capture_logs() as logs:
        async with running_ours(make_app(FakeDesk()), FULL) as server:
            await fill(server, SLOW_POST)
            for _ in range(3):
                assert await server.still_serves("/health")
            for path, kind in (("/v1/completions", b"overloaded"), ("/v1/messages", b"overloaded_error")):
                client = await server.connect()
                await client.send(post(path, b"{}"))
                answer = await client.answer()
                assert answer.status in (503, 529)
                assert b"\r\nretry-after:" in answer.head.lower()
                assert kind in answer.body
                assert await is_closed(client)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["connections.full"]


async def test_silent_newcomers_do_not_lock_out_probes() -> None:
    """The oldest reserved connection is evicted for a new one."""
    async with running_ours(make_app(FakeDesk()), FULL) as server:
        await fill(server, SLOW_POST)
        silent = await fill(server, b"GET /hea", 3 * connection_table.RESERVED_SLOTS)
        assert await server.still_serves("/health")
        assert await is_closed(silent[0])


async def test_slow_request_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes long to arrive is cut off for a new connection."""
    monkeypatch.setattr(connection_table, "SLOW_S", 0.0)
    monkeypatch.setattr(connection_table, "LOOK_EVERY_S", 0.0)
    async with running_ours(make_app(FakeDesk()), FULL) as server:
        slow = await fill(server, SLOW_POST)
        client = await server.connect()
        await client.send(post("/v1/completions", b"{}"))
        assert (await client.answer()).status == 400  # served: the body is invalid
        assert await is_closed(slow[0])


async def test_idle_connection_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept-alive connection between requests is closed for a new one."""
    monkeypatch.setattr(connection_table, "IDLE_S", 0.0)
    monkeypatch.setattr(connection_table, "LOOK_EVERY_S", 0.0)
    async with running_ours(make_app(FakeDesk()), FULL) as server:
        idle = await fill(server, get("/health"))
        for client in idle:
            assert (await client.answer()).status == 200
        client = await server.connect()
        await client.send(post("/v1/completions", b"{}"))
        assert (await client.answer()).status == 400
        assert await is_closed(idle[0])


async def test_request_in_progress_is_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has arrived completely is served to its end, however long that takes."""
    for name in ("SLOW_S", "IDLE_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(connection_table, name, 0.0)
    probe = Probe()
    async with running_ours(probe_app(probe), FULL) as server:
        served = await fill(server, post("/gate", b"a body"))
        await eventually(lambda: probe.num_entered == len(served), "all three requests have arrived")
        await fill(server, get("/hello"), 5)
        probe.gate.set()
        for client in served:
            assert (await client.answer()).status == 200


async def test_slots_are_released() -> None:
    """Connections that end release their slots, however often."""
    async with running_ours(make_app(FakeDesk(scripted())), FULL) as server:
        for _ in range(10):
            for client in await fill(server, post("/v1/completions", b"{}", "Connection: close")):
                assert (await client.answer()).status == 400
                assert await is_closed(client)
                await client.close()
            await trio.testing.wait_all_tasks_blocked(0.05)


def test_default_leaves_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request takes two descriptors, half as many connections are served."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1080, 1080))
    assert connection_table.default_max_connections() == 1000
    assert connection_table.default_max_connections(files_each=2) == 500
