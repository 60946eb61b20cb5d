"""The log line that ends a start: the URL that it shows, and when."""

from __future__ import annotations

import pytest
import structlog
import trio

from quipu.actors.fleet.processes.log_writer import LogWriter
from quipu.actors.request_desk.health import State
from quipu.web.cli.serve import announce, url_to_open
from quipu.web.http.server import Address
from tests.web.fakes import FakeDesk


@pytest.mark.parametrize(
    ("hosts", "serves_ui", "url"),
    [
        (["127.0.0.1"], True, "http://127.0.0.1:8000/ui"),
        (["127.0.0.1"], False, "http://127.0.0.1:8000"),
        (["0.0.0.0"], True, "http://127.0.0.1:8000/ui"),
        (["::"], True, "http://[::1]:8000/ui"),
        (["::1"], True, "http://[::1]:8000/ui"),
        (["::1", "127.0.0.1"], True, "http://127.0.0.1:8000/ui"),
        (["192.0.2.1"], True, "http://192.0.2.1:8000/ui"),
    ],
)
def test_url_can_be_opened(hosts: list[str], serves_ui: bool, url: str) -> None:
    """The URL can be opened in a browser, whatever address the server listens on."""
    assert url_to_open([Address(host, 8000) for host in hosts], serves_ui=serves_ui) == url


async def test_waits_until_ready(autojump_clock: trio.abc.Clock) -> None:
    """The URL is logged once, and not before the first engine is ready."""
    desk = FakeDesk()
    desk.state = State.STARTING
    with structlog.testing.capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(announce, "http://x/ui", desk.health, LogWriter(-1))
            await trio.sleep(5)
            assert lines == []
            desk.state = State.READY
    assert [(line["event"], line["detail"]) for line in lines] == [("server.ready", "ready: http://x/ui")]
