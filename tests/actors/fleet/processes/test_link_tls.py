"""TLS between a web process and engines on other machines: who is trusted, and what others can do."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.fleet.frames import FrameReader, FrameWriter, PeerGone
from quipu.actors.fleet.processes import strangers
from quipu.actors.fleet.processes.link_tls import LinkTls
from quipu.actors.fleet.processes.tcp_way import TcpWay
from quipu.actors.messages.scheduler import Abort
from tests.actors.fleet.processes.test_link_port import HOST, lifeline, meet, read_to_end, short_waits
from tests.actors.fleet.processes.tls_ports import FIRST, authority, open_port, other_authority, past, tls, way_of
from tests.authorities import Authority
from tests.processes import PATIENCE_S

__all__ = ["authority", "lifeline", "other_authority", "past", "short_waits", "tls"]

LONG = Abort(7)


# ---------------------------------------------------------------- peers that trust each other


async def test_frames_go_both_ways(tls: LinkTls, lifeline: tuple[int, int]) -> None:
    """Long and short frames arrive both ways, on one connection after another, over sockets that notice a lost peer."""
    async with open_port(tls) as port:
        engine = port.expect()
        way = way_of(port, engine.ticket, lifeline, tls)
        for incarnation in range(FIRST, FIRST + 3):
            ours, admission = await meet(port, way, engine, incarnation)
            theirs = admission.stream
            many = [Abort(number) for number in range(40_000)]
            received: list[Any] = []

            async def receive(
                stream: trio.SocketStream = theirs, incarnation: int = incarnation, received: list[Any] = received
            ) -> None:
                reader = FrameReader(stream, incarnation)
                while len(received) < 40_000:
                    received += await reader.receive_all()

            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive)
                    nursery.start_soon(FrameWriter(theirs, incarnation).send_all, [LONG])
                    await FrameWriter(ours, incarnation).send_all(many)
                    assert await FrameReader(ours, incarnation).receive_all() == [LONG]
            assert received == many
            for stream in (ours, theirs):
                assert stream.socket.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_KEEPIDLE) == 10
            await ours.aclose()
            await theirs.aclose()
        assert port.num_refused == 0


@pytest.mark.parametrize("end", ["closed", "forcefully", "abruptly", "half"])
async def test_end_of_a_connection_is_seen(tls: LinkTls, lifeline: tuple[int, int], end: str) -> None:
    """However a connection is closed, that waits for no answer, and the other side raises PeerGone."""
    async with open_port(tls) as port:
        engine = port.expect()
        ours, admission = await meet(port, way_of(port, engine.ticket, lifeline, tls), engine, FIRST)
        await FrameWriter(admission.stream, FIRST).send_all([LONG])
        with trio.fail_after(PATIENCE_S):
            match end:
                case "closed":
                    await ours.aclose()
                case "forcefully":
                    await trio.aclose_forcefully(ours)
                case "abruptly":
                    ours.socket.close()
                case "half":
                    ours.socket.shutdown(trio.socket.SHUT_WR)
            with pytest.raises(PeerGone):
                await FrameReader(admission.stream, FIRST).receive_all()
            if end == "half":
                assert await FrameReader(ours, FIRST).receive_all() == [LONG], "frames on their way must be read"
        await trio.aclose_forcefully(admission.stream)
        await trio.aclose_forcefully(ours)


async def test_closing_waits_for_nobody(tls: LinkTls, lifeline: tuple[int, int]) -> None:
    """A peer that has stopped reading does not delay closing."""
    async with open_port(tls) as port:
        engine = port.expect()
        ours, admission = await meet(port, way_of(port, engine.ticket, lifeline, tls), engine, FIRST)
        with suppress(BlockingIOError):
            while True:
                os.write(ours.socket.fileno(), bytes(1 << 16))
        with trio.fail_after(PATIENCE_S):
            await ours.aclose()
        await trio.aclose_forcefully(admission.stream)


async def test_garbage_after_the_handshake(tls: LinkTls) -> None:
    """A caller with a certificate that then violates TLS is refused, with TLS's reason."""
    async with open_port(tls) as port:
        stream = await trio.open_tcp_stream(*port.address)
        with capture_logs() as lines:
            secured = trio.SSLStream(stream, tls.engine_context(), server_hostname=HOST)
            await secured.do_handshake()
            await stream.send_all(bytes(100))
            with trio.fail_after(PATIENCE_S):
                while not port.num_refused:
                    await trio.sleep(0.01)
        (refused,) = [line["reason"] for line in lines if line["event"] == "link.refused"]
        assert refused.startswith("TLS: ")
        await trio.aclose_forcefully(stream)


async def test_nothing_is_readable_on_the_way(tls: LinkTls, lifeline: tuple[int, int]) -> None:
    """Neither the engine's key nor a greeting can be read from the bytes on the network."""
    async with open_port(tls) as port:
        engine = port.expect()
        seen = bytearray()

        async def carry(source: trio.SocketStream, target: trio.SocketStream) -> None:
            try:
                async for data in source:
                    seen.extend(data)
                    await target.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

        async def relay(caller: trio.SocketStream) -> None:
            async with caller, await trio.open_tcp_stream(*port.address) as target, trio.open_nursery() as both:
                both.start_soon(carry, caller, target)
                both.start_soon(carry, target, caller)

        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, relay, 0, host=HOST))
            way = TcpWay(lifeline[0], HOST, listener.socket.getsockname()[1], engine.ticket, tls)
            ours, admission = await meet(port, way, engine, FIRST)
            await FrameWriter(ours, FIRST).send_all([LONG])
            assert await FrameReader(admission.stream, FIRST).receive_all() == [LONG]
            nursery.cancel_scope.cancel()
        assert len(seen) > 1000
        assert engine.ticket.key not in seen
        assert b"quipu" not in seen
        for stream in (ours, admission.stream):
            await trio.aclose_forcefully(stream)


# ---------------------------------------------------------------- peers that do not


async def leave_when_refused(stream: trio.SocketStream) -> None:
    async with stream:
        await read_to_end(stream)


def impostor_files(kind: str, authority: Authority, other_authority: Authority, past: LinkTls) -> LinkTls | None:
    match kind:
        case "other authority":
            return attrs.evolve(other_authority.files(HOST), ca=authority.files(HOST).ca)
        case "distrusts":
            return attrs.evolve(authority.files(HOST), ca=other_authority.files(HOST).ca)
        case "expired":
            return past
        case "without a certificate":
            return authority.files(HOST)
        case _:
            return None


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("other authority", "TLS: unable to get local issuer certificate"),
        ("distrusts", "TLS: unexpected eof while reading"),  # it left without an alert
        ("expired", "TLS: certificate has expired"),
        ("without a certificate", "TLS: peer did not return a certificate"),
        ("plain", "TLS: wrong version number"),
        ("garbage", "TLS: "),
        ("silent", "it did not prove itself in time"),
    ],
)
async def test_callers_that_are_not_trusted(
    tls: LinkTls, authority: Authority, other_authority: Authority, past: LinkTls, lifeline: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch, kind: str, refusal: str,
) -> None:  # fmt: skip
    """They are refused and logged with the reason, and do not keep the true engine from being admitted meanwhile."""
    monkeypatch.setattr(strangers, "GREETING_S", 1.0 if kind == "silent" else 60.0)
    async with open_port(tls) as port:
        engine = port.expect()
        files = impostor_files(kind, authority, other_authority, past)
        with capture_logs() as lines:
            async with trio.open_nursery() as nursery:
                if kind in ("garbage", "silent"):
                    stranger = await trio.open_tcp_stream(*port.address)
                    await stranger.send_all(b"\x16\x03\x01\xff\xff" + bytes(1000) if kind == "garbage" else b"")
                    nursery.start_soon(leave_when_refused, stranger)
                elif kind == "without a certificate":
                    context = ssl.create_default_context(cafile=tls.ca)
                    bare = trio.SSLStream(await trio.open_tcp_stream(*port.address), context, server_hostname=HOST)
                    await bare.do_handshake()
                    with pytest.raises(trio.BrokenResourceError):
                        await bare.receive_some(1)
                    await trio.aclose_forcefully(bare)
                else:
                    nursery.start_soon(way_of(port, engine.ticket, lifeline, files).connect)
                with trio.fail_after(PATIENCE_S):
                    while not port.num_refused:
                        await trio.sleep(0.01)
                ours, admission = await meet(port, way_of(port, engine.ticket, lifeline, tls), engine, FIRST)
                nursery.cancel_scope.cancel()
        refused = [line["reason"] for line in lines if line["event"] == "link.refused"]
        assert refused
        assert refused[0].startswith(refusal), refused
        for stream in (ours, admission.stream):
            await trio.aclose_forcefully(stream)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("other authority", "TLS: self-signed certificate in certificate chain"),
        ("other name", "IP address mismatch"),
        ("expired", "certificate has expired"),
        ("plain", "it went away before TLS was agreed upon"),
    ],
)
async def test_hosts_that_are_not_trusted(
    tls: LinkTls, authority: Authority, other_authority: Authority, past: LinkTls, lifeline: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch, kind: str, fault: str,
) -> None:  # fmt: skip
    """An engine logs why it does not trust a host, and keeps trying; the host never has it as a caller."""
    monkeypatch.setattr(strangers, "GREETING_S", 60.0)
    files = {
        "other authority": other_authority.files(HOST),
        "other name": authority.files("127.0.0.9"),
        "expired": past,
        "plain": None,
    }[kind]
    async with open_port(files) as port:
        engine = port.expect()
        with capture_logs() as lines, trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(way_of(port, engine.ticket, lifeline, tls).connect)
                while len(faults := [line for line in lines if line["event"] == "link.impostor"]) < 2:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        assert all(fault in line["error"] for line in faults), faults
        with trio.move_on_after(0.1) as waited:
            await engine.wait_for_caller()
        assert waited.cancelled_caught


def test_only_tls_1_3(tls: LinkTls) -> None:
    """Both sides require TLS 1.3 and the other's certificate; engines also check the host's name."""
    for context in (tls.host_context(), tls.engine_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert tls.engine_context().check_hostname
