"""The port for engines on other machines: who is admitted, and what strangers can do."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import attrs
import pytest
import trio

from quipu import __version__
from quipu.actors.fleet.frames import FrameReader, FrameWriter
from quipu.actors.fleet.processes import link_handshake, link_port, strangers
from quipu.actors.fleet.processes.greeting import NUM_BYTES, OtherVersion, greeting
from quipu.actors.fleet.processes.link_handshake import HEAD_BYTES, Impostor, LinkTicket, prove_as_engine
from quipu.actors.fleet.processes.link_port import MAX_OF_ADDRESS, MAX_WAITING, LinkPort
from quipu.actors.fleet.processes.reconnection import Admission, receive_exactly
from quipu.actors.fleet.processes.tcp_way import TcpWay
from quipu.actors.messages.scheduler import Abort
from tests.processes import PATIENCE_S

HOST = "127.0.0.1"
FIRST, SECOND = 3, 4


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PENALTY_S", 0.05)


@pytest.fixture
async def port() -> AsyncIterator[LinkPort]:
    port = LinkPort(HOST, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port.run)
        yield port
        nursery.cancel_scope.cancel()
    port.close()


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    """Return the end of an engine, and that of the process that started it. A test may close the latter."""
    ours, theirs = os.pipe()
    yield ours, theirs
    os.close(ours)
    try:
        os.close(theirs)
    except OSError:
        return


def way_of(port: LinkPort, ticket: LinkTicket, lifeline: tuple[int, int]) -> TcpWay:
    return TcpWay(lifeline[0], *port.address, ticket)


async def meet(
    port: LinkPort, way: TcpWay, engine: link_port.ExpectedEngine, incarnation: int
) -> tuple[trio.SocketStream, Admission]:
    """Return both ends of a new connection."""
    admissions: list[Admission | None] = []

    async def connect() -> None:
        admissions.append(await way.connect())

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect)
            ours = await engine.admit(incarnation)
    (admission,) = admissions
    assert admission is not None
    return ours, admission


async def call(port: LinkPort, first: bytes) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(*port.address)
    await stream.send_all(first)
    return stream


async def read_to_end(stream: trio.SocketStream) -> bytes:
    received = b""
    with trio.fail_after(10):
        try:
            while data := await stream.receive_some(65536):
                received += data
        except trio.BrokenResourceError:  # the other end was closed before it had read everything
            pass
    return received


async def test_both_ends_meet_twice(port: LinkPort, lifeline: tuple[int, int]) -> None:
    """An engine connects, loses its connection, and connects again as the next incarnation."""
    engine = port.expect()
    way = way_of(port, engine.ticket, lifeline)
    for incarnation in (FIRST, SECOND):
        ours, admission = await meet(port, way, engine, incarnation)
        assert admission.incarnation == incarnation
        await FrameWriter(ours, incarnation).send_all([Abort(7)])
        assert await FrameReader(admission.stream, incarnation).receive_all() == [Abort(7)]
        await ours.aclose()
        await admission.stream.aclose()
    assert port.num_refused == 0


async def test_thread_to_look_up_the_host_is_waited_for(
    port: LinkPort, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that briefly has no thread or no memory to connect tries again."""
    errors, connect = [RuntimeError("can't start new thread"), MemoryError()], trio.open_tcp_stream

    async def connect_or_fail(host: str, number: int) -> trio.SocketStream:
        if errors:
            raise errors.pop()
        return await connect(host, number)

    monkeypatch.setattr(trio, "open_tcp_stream", connect_or_fail)
    engine = port.expect()
    ours, admission = await meet(port, way_of(port, engine.ticket, lifeline), engine, FIRST)
    assert admission.incarnation == FIRST and not errors
    for stream in (ours, admission.stream):
        await stream.aclose()


async def test_sockets_are_prepared(port: LinkPort, lifeline: tuple[int, int]) -> None:
    """Both ends send without delay, and notice that the other machine is lost."""
    engine = port.expect()
    ours, admission = await meet(port, way_of(port, engine.ticket, lifeline), engine, FIRST)
    for stream in (ours, admission.stream):
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        await stream.aclose()


@pytest.mark.parametrize("wrong", ["secret", "key"])
async def test_strangers_get_the_same_answer(port: LinkPort, wrong: str) -> None:
    """The answer does not tell whether a key exists; without its secret nobody is admitted."""
    engine, other = port.expect(), LinkTicket.new()
    ticket = attrs.evolve(engine.ticket, **{wrong: getattr(other, wrong)})
    stream = await trio.open_tcp_stream(*port.address)
    with trio.fail_after(PATIENCE_S), pytest.raises(Impostor, match="does not have this engine's secret"):
        await prove_as_engine(stream, ticket)
    await stream.send_all(bytes(link_handshake.PROOF_BYTES))
    assert await read_to_end(stream) == b""
    assert port.num_refused == 1
    await stream.aclose()


async def test_proof_of_another_connection(port: LinkPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaying what an engine has sent on another connection admits nobody."""
    engine = port.expect()
    sent: list[bytes] = []

    first = await trio.open_tcp_stream(*port.address)
    send_all = first.send_all

    async def record(data: bytes | bytearray | memoryview) -> None:
        sent.append(bytes(data))
        await send_all(data)

    monkeypatch.setattr(first, "send_all", record)
    await prove_as_engine(first, engine.ticket)
    with trio.fail_after(PATIENCE_S):
        await engine.wait_for_caller()
    again = await call(port, sent[0])
    await receive_exactly(again, link_handshake.NONCE_BYTES + link_handshake.PROOF_BYTES)
    await again.send_all(sent[1])
    assert await read_to_end(again) == b""
    assert port.num_refused == 1
    for stream in (first, again):
        await stream.aclose()


async def test_engine_proves_nothing_to_an_impostor(lifeline: tuple[int, int]) -> None:
    """A host without the secret gets the head, which is not secret, and then the end of the connection."""
    heard: list[bytes] = []
    admissions: list[Admission | None] = []

    async def pretend(stream: trio.SocketStream) -> None:
        async with stream:
            head = await receive_exactly(stream, HEAD_BYTES)
            await stream.send_all(bytes(link_handshake.NONCE_BYTES + link_handshake.PROOF_BYTES))
            heard.append(head + await read_to_end(stream))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, pretend, 0, host=HOST))
        number = listeners[0].socket.getsockname()[1]

        async def connect() -> None:
            admissions.append(await TcpWay(lifeline[0], HOST, number, LinkTicket.new()).connect())

        nursery.start_soon(connect)
        with trio.fail_after(PATIENCE_S):
            while not heard:
                await trio.sleep(0.01)
            os.close(lifeline[1])
            while not admissions:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert admissions == [None]
    assert {len(one) for one in heard} == {HEAD_BYTES}


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), b"quipu " + bytes(20), b""],
    ids=["http", "zeros", "half", "silent"],
)
async def test_garbage_is_refused_while_an_engine_is_admitted(
    port: LinkPort, lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """Callers that send garbage, or nothing, are refused; they do not keep an engine from being admitted meanwhile."""
    monkeypatch.setattr(strangers, "GREETING_S", 1.0)
    engine = port.expect()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            streams = [await trio.open_tcp_stream(*port.address) for _ in range(MAX_OF_ADDRESS - 1)]

            async def send(stream: trio.SocketStream) -> None:
                try:
                    await stream.send_all(first)
                except trio.BrokenResourceError:
                    return

            for stream in streams:
                nursery.start_soon(send, stream)
            while port.num_strangers + port.num_refused < len(streams):
                await trio.sleep(0.005)
            await trio.sleep(0.01)  # each has its deadline by now
            monkeypatch.setattr(strangers, "GREETING_S", 60.0)  # the engine's own
            ours, admission = await meet(port, way_of(port, engine.ticket, lifeline), engine, FIRST)
            for stream in streams:
                assert await read_to_end(stream) == b""
        assert port.num_refused == len(streams)
        for stream in (*streams, ours, admission.stream):
            await stream.aclose()


async def test_one_address_leaves_room_for_others(port: LinkPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers one address has, an engine at another address is admitted."""
    monkeypatch.setattr(strangers, "GREETING_S", 60.0)  # the silent ones keep their places
    engine = port.expect()
    silent = [await trio.open_tcp_stream(*port.address) for _ in range(2 * link_port.MAX_STRANGERS)]
    with trio.fail_after(PATIENCE_S):
        while port.num_refused < len(silent) - MAX_OF_ADDRESS:
            await trio.sleep(0.01)
        elsewhere = socket.socket()
        elsewhere.bind(("127.0.0.2", 0))
        elsewhere.connect(port.address)
        elsewhere.setblocking(False)
        caller = trio.SocketStream(trio.socket.from_stdlib_socket(elsewhere))
        await prove_as_engine(caller, engine.ticket)
        await engine.wait_for_caller()
    for stream in (*silent, caller):
        await stream.aclose()


@pytest.mark.parametrize("is_proved", [True, False])
async def test_version_is_judged_after_the_proof(
    port: LinkPort, monkeypatch: pytest.MonkeyPatch, is_proved: bool
) -> None:
    """Only an engine that has proved itself is told that its version differs."""
    engine = port.expect()
    monkeypatch.setattr(link_handshake, "greeting", lambda _: greeting("9.9"))
    stream = await trio.open_tcp_stream(*port.address)
    if is_proved:
        await prove_as_engine(stream, engine.ticket)
        with trio.fail_after(PATIENCE_S), pytest.raises(OtherVersion, match=rf"9\.9.*{__version__}"):
            await engine.admit(FIRST)
    else:
        with pytest.raises(Impostor):
            await prove_as_engine(stream, LinkTicket(engine.ticket.key, b"another"))
        await stream.send_all(bytes(link_handshake.PROOF_BYTES))
        assert await read_to_end(stream) == b""
        with trio.move_on_after(0.1) as waited:
            await engine.admit(FIRST)
        assert waited.cancelled_caught
    await stream.aclose()


async def test_given_up_connections_are_passed_over(port: LinkPort) -> None:
    """Of an engine's many connections, the latest that it has not given up is admitted; the others are closed."""
    engine = port.expect()
    calls: list[trio.SocketStream] = []
    for _ in range(MAX_WAITING + 1):
        calls.append(await trio.open_tcp_stream(*port.address))
        await prove_as_engine(calls[-1], engine.ticket)
        with trio.fail_after(PATIENCE_S):
            while port.num_strangers:
                await trio.sleep(0.01)
    assert await read_to_end(calls[0]) == b"", "the oldest must be closed"
    await calls[-1].aclose()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def agree() -> None:
                assert await receive_exactly(calls[-2], 4) == FIRST.to_bytes(4, "little")
                await calls[-2].send_all(b"!")

            nursery.start_soon(agree)
            ours = await engine.admit(FIRST)
        await ours.send_all(b"x")
        assert await calls[-2].receive_some(1) == b"x"
    engine.close()
    for stream in calls[1:-2]:
        assert await read_to_end(stream) == b""
    for stream in (*calls, ours):
        await stream.aclose()


async def test_closed_port_keeps_no_connection() -> None:
    """When the port is closed, connections of engines that were not admitted are closed."""
    port = LinkPort(HOST, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port.run)
        stream = await trio.open_tcp_stream(*port.address)
        engine = port.expect()
        await prove_as_engine(stream, engine.ticket)
        with trio.fail_after(PATIENCE_S):
            await engine.wait_for_caller()
        nursery.cancel_scope.cancel()
    port.close()
    assert await read_to_end(stream) == b""
    await stream.aclose()


async def test_closed_engine_is_a_stranger(port: LinkPort, lifeline: tuple[int, int]) -> None:
    """An engine that is no longer expected is treated like a stranger, and stops once its lifeline is closed."""
    engine = port.expect()
    engine.close()
    stream = await trio.open_tcp_stream(*port.address)
    with pytest.raises(Impostor):
        await prove_as_engine(stream, engine.ticket)
    await stream.aclose()
    os.close(lifeline[1])
    with trio.fail_after(PATIENCE_S):
        assert await way_of(port, engine.ticket, lifeline).connect() is None


def test_secret_is_not_shown() -> None:
    """A ticket's representation, which may be logged, does not contain its secret."""
    ticket = LinkTicket.new()
    assert ticket.secret.hex() not in repr(ticket) and repr(ticket.secret) not in repr(ticket)


def test_length_of_greetings() -> None:
    """A greeting has the number of bytes that the other side reads."""
    assert len(greeting(__version__)) == NUM_BYTES


async def test_port_in_use_is_an_error(port: LinkPort) -> None:
    """A port that another process listens on is an OSError."""
    with pytest.raises(OSError, match="in use"):
        LinkPort(*port.address)
