"""Files and flags of TLS between a web process and engines: which are refused, and who uses them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.config.cluster_config import ClusterConfig
from quipu.actors.fleet.processes.link_tls import LinkTls, tls_of
from quipu.actors.fleet.processes.tcp_way import TcpWay, address_of
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli import settings
from quipu.web.cli.cli import make_parser
from tests.actors.fleet.processes.test_link_port import HOST, lifeline, meet, short_waits
from tests.actors.fleet.processes.tls_ports import FIRST, authority, open_port, other_authority, past, tls, way_of
from tests.authorities import Authority
from tests.processes import PATIENCE_S, has_ended
from tests.prompts import prompt_of
from tests.remote_engines import LocalNodes, open_remote_engines
from tests.runtimes import assert_served
from tests.tiny import TINY

__all__ = ["authority", "lifeline", "other_authority", "past", "short_waits", "tls"]


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
