"""TLS between a web process and engines on other machines: who is trusted, and what others can do."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.fleet.frames import FrameReader, FrameWriter, PeerGone
from quipu.actors.fleet.processes import strangers
from quipu.actors.fleet.processes.link_handshake import LinkTicket
from quipu.actors.fleet.processes.link_port import LinkPort
from quipu.actors.fleet.processes.link_tls import LinkTls, tls_of
from quipu.actors.fleet.processes.tcp_way import TcpWay, address_of
from quipu.actors.messages.scheduler import Abort
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli import settings
from quipu.web.cli.cli import make_parser
from tests.actors.fleet.processes.test_link_port import HOST, lifeline, meet, read_to_end, short_waits
from tests.authorities import Authority
from tests.processes import PATIENCE_S, has_ended
from tests.prompts import prompt_of
from tests.remote_engines import LocalNodes, open_remote_engines
from tests.runtimes import assert_served
from tests.tiny import TINY

__all__ = ["lifeline", "short_waits"]

FIRST = 3
LONG = Abort(7)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> LinkTls:
    return authority.files(HOST)


@asynccontextmanager
async def open_port(tls: LinkTls | None) -> AsyncIterator[LinkPort]:
    port = LinkPort(HOST, 0, None if tls is None else tls.host_context())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port.run)
        yield port
        nursery.cancel_scope.cancel()
    port.close()


def way_of(port: LinkPort, ticket: LinkTicket, lifeline: tuple[int, int], tls: LinkTls | None) -> TcpWay:
    return TcpWay(lifeline[0], *port.address, ticket, tls)


@pytest.fixture
def past(authority: Authority) -> LinkTls:
    now = datetime.now(UTC)
    return authority.files(HOST, not_before=now - timedelta(days=9), not_after=now - timedelta(days=1))


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


# ---------------------------------------------------------------- files and flags


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "empty").write_text("")
    (folder / "rubbish").write_text("-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n")
    (folder / "encrypted").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    yield folder


def test_files_that_fit_are_accepted(tls: LinkTls) -> None:
    """A certificate, its key and its authority pass the check."""
    tls.check()


@pytest.mark.parametrize(
    ("field", "name", "message"),
    [
        ("cert", "missing", "--link-tls-cert: cannot read .*missing: No such file"),
        ("key", "missing", "--link-tls-key: cannot read .*missing: No such file"),
        ("ca", "missing", "--link-tls-ca: cannot read .*missing: No such file"),
        ("cert", "", "--link-tls-cert: cannot read .*: Is a directory"),
        ("cert", "empty", "--link-tls-cert: .*empty has no certificate in PEM form"),
        ("key", "empty", "--link-tls-key: .*empty has no private key in PEM form"),
        ("key", "encrypted", "--link-tls-key: .*encrypted is encrypted"),
        ("ca", "rubbish", "--link-tls-ca .*rubbish: "),
        ("cert", "rubbish", "--link-tls-cert .*rubbish: "),
    ],
)
def test_unusable_files(tls: LinkTls, broken: Path, field: str, name: str, message: str) -> None:
    """A file that cannot be used is an error that names its flag, its path and the reason."""
    with pytest.raises(CheckpointError, match=message):
        attrs.evolve(tls, **{field: str(broken / name)}).check()


def test_files_that_do_not_fit_each_other(
    tls: LinkTls, authority: Authority, other_authority: Authority, past: LinkTls
) -> None:
    """A key of another certificate, another authority and an expired certificate are errors."""
    other = authority.files("engine.example")
    with pytest.raises(CheckpointError, match=r"--link-tls-key .* with --link-tls-cert .*: key values mismatch"):
        attrs.evolve(tls, key=other.key).check()
    with pytest.raises(CheckpointError, match=r"--link-tls-cert .*: unable to get local issuer certificate.*tls-ca"):
        attrs.evolve(tls, ca=other_authority.files(HOST).ca).check()
    with pytest.raises(CheckpointError, match=r"--link-tls-cert .*: certificate has expired"):
        past.check()


def test_flags_come_together() -> None:
    """If some of the three flags are given, the error names the missing ones."""
    assert tls_of(ClusterConfig(model="tiny")) is None
    with pytest.raises(CheckpointError, match="--link-tls-cert needs --link-tls-key and --link-tls-ca, too"):
        tls_of(ClusterConfig(model="tiny", link_tls_cert="a"))
    with pytest.raises(CheckpointError, match="--link-tls-key needs --link-tls-cert, too"):
        tls_of(ClusterConfig(model="tiny", link_tls_key="a", link_tls_ca="b"))
    assert tls_of(ClusterConfig(model="tiny", link_tls_cert="a", link_tls_key="b", link_tls_ca="c")) == LinkTls(
        "a", "b", "c"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "web.example"])
def test_address_is_readable(host: str) -> None:
    """Without TLS, an address is host and port; with TLS, it also names the files, whatever characters they contain."""
    shown = f"[{host}]" if ":" in host else host
    assert address_of(host, 8123) == f"tcp://{shown}:8123"
    assert address_of(host, 8123, LinkTls("/a b&c", "/k=1", "/d?#")) == (
        f"tls://{shown}:8123?cert=%2Fa+b%26c&key=%2Fk%3D1&ca=%2Fd%3F%23"
    )


async def test_engine_calls_as_it_was_told(authority: Authority, tmp_path: Path, lifeline: tuple[int, int]) -> None:
    """An engine needs only its lifeline and an address, whose file names may contain special characters."""
    issued = authority.files(HOST)
    odd = LinkTls(*(str(tmp_path / name) for name in ("a b&c", "k=1", "d?#")))
    for source, target in zip(attrs.astuple(issued), attrs.astuple(odd), strict=True):
        shutil.copy(source, target)
    async with open_port(issued) as port:
        engine = port.expect()
        os.write(lifeline[1], engine.ticket.pack())
        way = TcpWay.of_lifeline(lifeline[0], address_of(*port.address, odd))
        ours, admission = await meet(port, way, engine, FIRST)
        for stream in (ours, admission.stream):
            await trio.aclose_forcefully(stream)


async def test_engine_without_usable_files_ends(tls: LinkTls, lifeline: tuple[int, int]) -> None:
    """An engine whose files cannot be used logs which flag is at fault, and does not try for minutes."""
    async with open_port(tls) as port:
        engine = port.expect()
        with capture_logs() as lines, trio.fail_after(PATIENCE_S):
            files = attrs.evolve(tls, cert="/nowhere.pem")
            assert await way_of(port, engine.ticket, lifeline, files).connect() is None
    assert [line["event"] for line in lines] == ["link.tls_unusable"]
    assert "--link-tls-cert" in lines[0]["error"]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_engine_processes_serve_over_tls(tls: LinkTls) -> None:
    """Two processes load, answer with exact counts, and end with the server, as without TLS."""
    files = ClusterConfig(model="tiny", link_tls_cert=tls.cert, link_tls_key=tls.key, link_tls_ca=tls.ca)
    async with trio.open_nursery() as tasks:
        nodes = LocalNodes(tasks)
        async with open_remote_engines(nodes, cluster=files) as engines:
            for seed in range(4):
                answer = await engines.client.ask(prompt_of(70, seed), max_tokens=8)
                assert_served(answer, prompt_of(70, seed), 8)
            assert all(b"tls://" in command_of(pid) for pid in nodes.pids.values())
        assert all(map(has_ended, nodes.pids.values()))
        tasks.cancel_scope.cancel()


def test_flags_are_checked_at_start(tls: LinkTls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose files do not fit does not start; the message names the flag."""
    monkeypatch.setattr(settings, "check_ray", lambda: None)
    flags = ["--engines", "ray:1", "--link-tls-cert", tls.cert, "--link-tls-key", tls.key, "--link-tls-ca"]
    parser = make_parser()
    config, _ = settings.resolve_config(parser.parse_args(["serve", str(TINY), *flags, tls.ca]))
    assert config.cluster is not None
    assert tls_of(config.cluster) == tls
    with pytest.raises(CheckpointError, match="--link-tls-ca: cannot read /nowhere"):
        settings.resolve_config(parser.parse_args(["serve", str(TINY), *flags, "/nowhere"]))
