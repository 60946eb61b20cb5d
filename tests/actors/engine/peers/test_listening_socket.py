"""Where engines of several machines await each other: any port, or one of a range."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from quipu.actors.engine.peers.listening_socket import NoPeerPort, listen_at
from tests.processes import free_ports

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> tuple[int, int]:
    """Return a range of two ports that are free."""
    while True:
        (first,) = free_ports(1)
        try:
            socket.create_server((HOST, first + 1)).close()
        except (OSError, OverflowError):
            continue
        return first, first + 1


@pytest.fixture
def open_sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def port_of(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


def test_each_takes_the_next_free_port(ports: tuple[int, int], open_sockets: ExitStack) -> None:
    """The engines of a node take one port each; if none is left, the range and the host are named."""
    first = open_sockets.enter_context(listen_at(HOST, ports))
    second = open_sockets.enter_context(listen_at(HOST, ports))
    assert (port_of(first), port_of(second)) == ports
    words = (
        f"--peer-ports: all ports from {ports[0]} to {ports[1]} are taken on {HOST}, and each engine of a node needs"
    )
    with pytest.raises(NoPeerPort, match=words):
        listen_at(HOST, ports, patience_s=0.0)
    with pytest.raises(NoPeerPort, match=f"--peer-ports: port {ports[1]} is taken on {HOST}"):
        listen_at(HOST, (ports[1], ports[1]), patience_s=0.0)


def test_port_that_is_given_back(
    ports: tuple[int, int], open_sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port of an engine that is about to end is awaited; what is left of its connections does not matter."""
    last = listen_at(HOST, (ports[0], ports[0]))
    client = open_sockets.enter_context(socket.create_connection((HOST, ports[0])))
    last.setblocking(True)
    served, _ = last.accept()
    waits = []

    def end_it(seconds: float) -> None:
        waits.append(seconds)
        served.close()
        assert client.recv(1) == b""  # so the server's side of the connection lingers
        last.close()

    monkeypatch.setattr(time, "sleep", end_it)
    again = open_sockets.enter_context(listen_at(HOST, (ports[0], ports[0])))
    assert port_of(again) == ports[0] and len(waits) == 1


def test_where_it_may_not_listen(ports: tuple[int, int]) -> None:
    """An address of another machine is no reason to try the next port, and the system's words are passed on."""
    with pytest.raises(NoPeerPort, match=rf"--peer-ports: cannot listen on 192\.0\.2\.77 port {ports[0]}: .*assign"):
        listen_at("192.0.2.77", ports)


def test_any_port(open_sockets: ExitStack) -> None:
    """Without a range, the system chooses."""
    assert port_of(open_sockets.enter_context(listen_at(HOST, None))) > 0
