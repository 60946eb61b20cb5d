"""A request's releases run exactly once, whatever ends the request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
from quart import Response
from quart_trio import QuartTrio

from quipu.web.http.scope import Releases, ScopedHTTP, request_scope
from quipu.web.http.server import ServerConfig
from tests.web.http.live import PATIENCE_S, Client, Probe, Running, get, probe_app, running_ours


async def answered(client: Client, probe: Probe, server: Running) -> None:
    assert (await client.answer()).status in (200, 500)


async def left(client: Client, probe: Probe, server: Running) -> None:
    await probe.entered.wait()
    await client.close()


async def shut_down(client: Client, probe: Probe, server: Running) -> None:
    await probe.entered.wait()
    server.stop.set()
    await server.ended.wait()


@pytest.mark.parametrize(
    ("path", "end"),
    [
        pytest.param("/hello", answered, id="normal-return"),
        pytest.param("/raise", answered, id="handler-exception"),
        pytest.param("/break", answered, id="generator-exception"),
        pytest.param("/idle", left, id="disconnect-before-the-response"),
        pytest.param("/late-stream", left, id="disconnect-before-the-generator-starts"),
        pytest.param("/idle-stream", left, id="disconnect-in-mid-stream"),
        pytest.param("/idle", shut_down, id="shutdown-before-the-response"),
        pytest.param("/idle-stream", shut_down, id="shutdown-in-mid-stream"),
    ],
)
async def test_release_runs_once(path: str, end: Any) -> None:
    """A release runs even if the generator has not begun, whose own `finally` never runs then."""
    probe = Probe()
    async with running_ours(probe_app(probe), ServerConfig(graceful_timeout_s=0.02)) as server:
        client = await server.connect()
        await client.get(path)
        with trio.fail_after(PATIENCE_S):
            await end(client, probe, server)  # one of the three above
            await probe.released.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert probe.num_released == 1
    assert probe.num_released == 1
    assert "generator finally" not in probe.seen


async def test_releases_run_after_the_tasks_of_the_request() -> None:
    """Releases run last-in first-out, when no task of the request is left."""
    log: list[str] = []
    closed = trio.Event()
    app = QuartTrio("order")
    app.asgi_http_class = ScopedHTTP

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log.append("task")

    @app.route("/")
    async def handler() -> Response:
        scope = request_scope()
        scope.on_close(closed.set)
        scope.on_close(log.append, "first")
        scope.on_close(log.append, "second")
        scope.start_soon(task)

        async def body() -> AsyncGenerator[bytes, None]:
            yield b"x"
            log.append("generator")

        return Response(body())

    async with running_ours(app) as server:
        client = await server.connect()
        await client.send(get("/", "Connection: close"))
        assert (await client.answer()).is_complete
        with trio.fail_after(PATIENCE_S):
            await closed.wait()
        assert log == ["generator", "task", "second", "first"]


async def test_failing_task_ends_only_its_own_request() -> None:
    """The response is a 500, the release runs, and the server continues."""
    probe = Probe()
    app = probe_app(probe)

    async def fail() -> None:
        await probe.entered.wait()
        raise RuntimeError("a task failed")

    @app.route("/task")
    async def handler() -> str:
        request_scope().start_soon(fail)
        await probe.wait_forever()
        return "never"

    async with running_ours(app) as server:
        client = await server.connect()
        await client.get("/task")
        assert (await client.answer()).status == 500
        assert probe.num_released == 1
        assert await server.still_serves()


async def test_failing_release_is_contained() -> None:
    """The client gets its response, the other releases run, and the connection continues."""
    probe = Probe()
    app = probe_app(probe)

    def fail() -> None:
        raise RuntimeError("a release failed")

    @app.route("/bad-release")
    async def handler() -> str:
        request_scope().on_close(fail)
        return "done"

    async with running_ours(app) as server:
        client = await server.connect()
        for num_before in range(2):
            await client.get("/bad-release")
            assert (await client.answer()).body == b"done"
            with trio.fail_after(PATIENCE_S):
                await probe.released.wait()
            assert probe.num_released == num_before + 1
            probe.released = trio.Event()


def test_failures_of_releases_do_not_hide_each_other() -> None:
    """All failures are raised together with the request's own exception, and each callback runs."""
    log: list[str] = []

    def fail(name: str) -> None:
        log.append(name)
        raise RuntimeError(name)

    with pytest.raises(BaseExceptionGroup) as caught:
        with Releases() as releases:
            releases.push(lambda: fail("a"))
            releases.push(lambda: log.append("b"))
            releases.push(lambda: fail("c"))
            raise ValueError("the request")
    assert log == ["c", "b", "a"]
    assert [str(failure) for failure in caught.value.exceptions] == ["the request", "c", "a"]


def test_exception_without_failing_release_is_not_grouped() -> None:
    """Without failing releases an exception is not wrapped in a group."""
    with pytest.raises(ValueError, match="the request"):
        with Releases() as releases:
            releases.push(list)
            raise ValueError("the request")


async def test_cancellation_passes_through_failing_releases() -> None:
    """A cancellation still finds its scope."""

    def fail() -> None:
        raise RuntimeError("a release")

    with pytest.RaisesGroup(RuntimeError):
        with trio.CancelScope() as scope:
            with Releases() as releases:
                releases.push(fail)
                scope.cancel()
                await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
