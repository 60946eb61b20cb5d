"""What a service manager such as systemd is told, and the unit that comes with the project."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from quipu.actors.request_desk.health import Health, State
from quipu.web.cli.service_manager import POLL_S, Manager, find_manager, notify
from tests.deploy.service import UNIT, check_unit


@contextmanager
def manager_socket(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
        link.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        yield link


def received(link: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(link.recv(4096).decode())
        except BlockingIOError:
            return messages


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
async def test_life_of_a_server(autojump_clock: trio.abc.Clock, tmp_path: Path, abstract: bool) -> None:
    """Ready once it can serve; alive twice in each interval, but only while it is healthy; stopping at the signal."""
    address = f"@quipu-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    state, stopping = State.STARTING, trio.Event()
    with manager_socket(address) as link:
        async with trio.open_nursery() as nursery:
            manager = Manager(address, watchdog_s=4.0)
            nursery.start_soon(notify, manager, lambda: Health(state, 1, ""), stopping)
            await trio.sleep(1)
            assert received(link) == ["WATCHDOG=1"], "loading is no fault"
            state = State.READY
            await trio.sleep(2 * POLL_S)
            assert received(link) == ["READY=1\nSTATUS=Serving."]
            await trio.sleep(20)
            assert received(link) == ["WATCHDOG=1"] * 10
            state = State.RESTARTING
            await trio.sleep(20)
            assert received(link) == [], "the manager may end a server that cannot restart its engine"
            state = State.DRAINING
            stopping.set()
            await trio.sleep(1)
            assert received(link) == ["STOPPING=1\nSTATUS=Finishing the requests that are open.", "WATCHDOG=1"]
            nursery.cancel_scope.cancel()


async def test_manager_that_is_gone_or_does_not_read(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    """Sending to such a manager neither raises nor waits."""
    address = str(tmp_path / "notify")
    Manager(address).send("READY=1")
    with manager_socket(address):
        for _ in range(1000):
            Manager(address).send("WATCHDOG=1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
        ({"NOTIFY_SOCKET": "/run/notify"}, Manager("/run/notify")),
        ({"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "30000000"}, Manager("@abstract", 30.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, Manager("/x", 2.0)),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, Manager("/x")),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, Manager("/x")),
    ],
)
def test_environment(environment: dict[str, str], expected: Manager | None) -> None:
    """The variables mean what sd_notify(3) and sd_watchdog_enabled(3) say; children do not inherit them."""
    assert find_manager(environment) == expected
    assert not environment


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_unit(tmp_path: Path) -> None:
    """systemd accepts the unit, and calls its exposure low."""
    assert "exposure" in check_unit(tmp_path)


def test_flags_of_the_unit_exist() -> None:
    """The unit's command is one that `quipu serve` understands."""
    from quipu.web.cli.cli import make_parser

    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", UNIT.read_text(), re.MULTILINE)
    (example,) = re.findall(r"QUIPU_FLAGS=(.*)$", UNIT.read_text(), re.MULTILINE)
    arguments = make_parser().parse_args(line.replace("$QUIPU_FLAGS", example).split())
    assert arguments.data_dir is not None and arguments.shutdown_timeout == 60
