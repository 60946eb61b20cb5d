"""Which process is admitted on a new connection, and how it learns that it is not wanted."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import trio

from quipu import __version__
from quipu.actors.fleet.processes import reconnection
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.reconnection import TOKEN_BYTES, Admission, Listener, WayBack
from tests.processes import PATIENCE_S


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()
    listener.close_lifeline_of_child()


def way_back_of(listener: Listener) -> WayBack:
    return WayBack(listener.lifeline, listener.address)


async def connect(way_back: WayBack, admissions: list[Admission | None]) -> None:
    admissions.append(await way_back.connect())


async def assert_admitted(listener: Listener, way_back: WayBack, incarnation: int = 7) -> None:
    """Assert that the process is admitted as this incarnation, and both ends are connected."""
    admissions: list[Admission | None] = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, way_back, admissions)
            stream = await listener.admit(incarnation)
        (admission,) = admissions
        assert admission is not None and admission.incarnation == incarnation
        async with stream, admission.stream:
            await stream.send_all(b"x")
            assert await admission.stream.receive_some() == b"x"


async def test_admitted_again_and_again() -> None:
    """A process may lose any number of connections."""
    with listening() as listener:
        way_back = way_back_of(listener)
        for incarnation in (2, 5, 9):
            await assert_admitted(listener, way_back, incarnation)


def caller_of(listener: Listener, data: bytes, *, stays: bool) -> socket.socket:
    """Connect as a process that sends `data`."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.connect(bytes.fromhex(listener.address))
    caller.sendall(data)
    if not stays:
        caller.close()
    return caller


STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "wrong token": lambda token: greeting(__version__) + bytes(TOKEN_BYTES),
    "other version": lambda token: greeting("0.0.1") + token,
    "nothing": lambda token: b"",
    "not a greeting": lambda token: b"GET / HTTP/1.1\r\n" * 8,
    "part of a token": lambda token: greeting(__version__) + token[:-1],
    "does not agree": lambda token: greeting(__version__) + token,
}


@pytest.mark.parametrize("stays", [False, True], ids=["gone", "waiting"])
@pytest.mark.parametrize("name", STRANGERS)
async def test_strangers(monkeypatch: pytest.MonkeyPatch, name: str, stays: bool) -> None:
    """Other callers that have connected before are not admitted, and do not keep the engine out."""
    monkeypatch.setattr(reconnection, "GREETING_S", 0.1)
    with listening() as listener:
        way_back = way_back_of(listener)
        token = os.read(listener.lifeline, TOKEN_BYTES)
        setattr(way_back, "_token", token)  # noqa: B010 - private, and it was read above
        with caller_of(listener, STRANGERS[name](token), stays=stays) as caller:
            await assert_admitted(listener, way_back)
            if stays:
                told = (7).to_bytes(4, "little") if name == "does not agree" else b""
                with suppress(ConnectionResetError):  # it had sent more than was read
                    assert caller.recv(100) in (told, b""), "its time may be over before it is told the incarnation"


async def test_host_that_is_gone() -> None:
    """A process learns at once that its host is gone, while it waits to be admitted, and before it connects."""
    listener = Listener()
    way_back = way_back_of(listener)
    assert way_back.is_open()
    admissions: list[Admission | None] = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, way_back, admissions)
            await listener.wait_for_caller()
            await trio.sleep(0.05)
            assert admissions == []
            listener.close()
        assert admissions == [None] and not way_back.is_open()
        assert await way_back.connect() is None
    listener.close_lifeline_of_child()
