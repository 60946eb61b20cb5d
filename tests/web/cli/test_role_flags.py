"""`--engines` with roles: how they are written, and which a server can be started with."""

from __future__ import annotations

import argparse

import pytest
from structlog.testing import capture_logs

from quipu.actors.config.declarations import Bounds
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.web.cli import settings
from quipu.web.cli.cli import make_parser
from quipu.web.cli.setting_flags import EngineCounts, parse_engines, parse_ports
from quipu.web.cli.settings import resolve_config
from tests.tiny import TINY

PREFILL, DECODE, MIXED = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.MIXED
BOUNDS = Bounds(minimum=0, maximum=16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", EngineCounts(0)),
        ("3", EngineCounts(3)),
        ("ray:3", EngineCounts(3, on_ray=True)),
        ("mixed:2", EngineCounts(2)),
        ("prefill:1,decode:2", EngineCounts(3, (PREFILL, DECODE, DECODE))),
        ("decode:1,mixed:1,prefill:1", EngineCounts(3, (DECODE, MIXED, PREFILL))),
        ("ray:prefill:1,decode:1", EngineCounts(2, (PREFILL, DECODE), on_ray=True)),
    ],
)
def test_ways_to_write_them(text: str, expected: EngineCounts) -> None:
    """A number alone means engines that do everything; roles are those of the engines in the order of their ids."""
    assert parse_engines(BOUNDS, text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prefill:1,", "must be a number, or numbers by role (prefill, decode, mixed)"),
        ("1,decode:2", "must be a number, or numbers by role"),
        ("encode:1,decode:1", "not 'encode:1,decode:1'"),
        ("prefill:1,prefill:2", "names prefill twice"),
        ("prefill:0,decode:1", "must be between 1 and 16, not 0"),
        ("prefill:,decode:1", "must be a whole number, not ''"),
        ("prefill,decode:1", "must be a whole number, not ''"),
        ("prefill:x,decode:1", "must be a whole number, not 'x'"),
        ("prefill:8,decode:9", "must be between 0 and 16, not 17"),
        ("ray:ray:2", "must be a number, or numbers by role"),
        ("two", "must be a whole number, not 'two'"),
    ],
)
def test_what_is_no_number_of_engines(text: str, problem: str) -> None:
    """A mistake is refused with what was expected, and what stands there instead."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse_engines(BOUNDS, text)
    assert problem in str(caught.value)


def test_errors_name_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in a role is reported under the flag's name."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", str(TINY), "--engines", "prefil:1,decode:1"])
    assert "argument --engines: must be a number, or numbers by role" in capsys.readouterr().err


def test_resolved() -> None:
    """The server knows the role of each engine, shows them, and has a limit for what the decode side computes."""
    flags = ["--engines", "prefill:1,decode:2", "--prefill-local-tokens", "100"]
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert [config.role_of(engine_id) for engine_id in range(4)] == [PREFILL, DECODE, DECODE, MIXED]
    assert (config.num_engines, config.prefill_local_tokens, config.why_no_roles) == (3, 100, None)
    assert info.settings["engine_roles"] == ("prefill", "decode", "decode")
    assert (info.settings["engines"], info.settings["prefill_local_tokens"]) == (3, 100)


def test_without_roles() -> None:
    """A server that was started with a number alone has mixed engines, and shows no roles."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), "--engines", "mixed:2"]))
    assert (config.engine_roles, config.role_of(0)) == ((), MIXED)
    assert "engine_roles" not in info.settings


@pytest.mark.parametrize(
    ("flags", "has_peers"),
    [
        ([], False),
        (["--engines", "2"], True),
        (["--max-engines", "2"], True),
        (["--engines", "2", "--no-enable-prefix-caching"], False),
        (["--engines", "prefill:1,decode:1"], True),
        (["--engines", "prefill:1,decode:1", "--tensor-parallel-size", "2"], False),
        (["--engines", "ray:1"], False),
        (["--engines", "ray:2"], True),
        (["--engines", "ray:prefill:1,decode:1"], True),
    ],
)
def test_engines_that_fetch_from_each_other(flags: list[str], has_peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines fetch each other's blocks where there may be several of them, and blocks are found again, on whichever
    machines they are. If those with roles cannot, the log says so."""
    monkeypatch.setattr(settings, "check_ray", lambda: None)
    with capture_logs() as lines:
        config, _ = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.has_peers is has_peers
    warned = "config.roles_without_peers" in [line["event"] for line in lines]
    assert warned is (bool(config.engine_roles) and not has_peers)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "prefill:2"], "--engines has only engines for prefill: add some for decode, or mixed ones"),
        (["--engines", "decode:2"], "--engines has only engines for decode: add some for prefill, or mixed ones"),
        (
            ["--engines", "prefill:1,decode:1", "--on-engine-death", "fail"],
            "--engines with roles needs --on-engine-death resume",
        ),
        (
            ["--engines", "prefill:1,decode:1", "--no-enable-prefix-caching"],
            "--engines with roles needs --enable-prefix-caching",
        ),
        (
            ["--engines", "prefill:1,decode:1", "--max-engines", "4"],
            "--engines with roles cannot be scaled automatically (--min-engines, --max-engines)",
        ),
    ],
)
def test_engines_that_cannot_serve_together(flags: list[str], message: str) -> None:
    """A server whose engines could not do everything together, or whose settings allow no roles, does not start."""
    with pytest.raises(CheckpointError) as caught:
        resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert str(caught.value) == message


@pytest.mark.parametrize(("text", "expected"), [("7600-7607", (7600, 7607)), ("7600", (7600, 7600))])
def test_ports_of_peers(text: str, expected: tuple[int, int]) -> None:
    """A range of ports, or a single one."""
    assert parse_ports(text) == expected
    assert make_parser().parse_args(["serve", "demo", "--peer-ports", text]).peer_ports == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("7607-7600", "must begin with the lower port, not '7607-7600'"),
        ("0-10", "must be between 1 and 65535, not 0"),
        ("65000-65536", "must be between 1 and 65535, not 65536"),
        ("7600-", "must be a range of ports such as 7600-7607, not '7600-'"),
        ("7600:7607", "must be a range of ports"),
        ("any", "must be a range of ports"),
    ],
)
def test_what_is_no_range_of_ports(text: str, problem: str) -> None:
    """A mistake is refused with what was expected."""
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse_ports(text)
    assert problem in str(caught.value)
