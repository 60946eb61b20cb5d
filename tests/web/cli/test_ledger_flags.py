"""The ledger flags of `quipu serve`: their meaning, and invalid values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.actors.ledger.service import LedgerConfig
from quipu.web.cli import explain_command, ledger, run_batch_command, serve_command
from quipu.web.cli.ledger_flags import ledger_config, ledger_settings
from quipu.web.cli.serve_flags import add_serve_flags


def config_of(*flags: str, **environment: str) -> LedgerConfig:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    return attrs.evolve(ledger_config(parser.parse_args(flags), environment), version="")


def test_defaults() -> None:
    """The defaults are those of the config."""
    assert config_of() == LedgerConfig(Path("data"))


def test_bounds() -> None:
    """Each bound has its flag and is shown by `/server_info`."""
    config = config_of("--max-idempotency-keys", "7", "--max-refusal-records", "0")
    assert (config.max_idempotency_keys, config.max_refusal_records) == (7, 0)
    shown: dict[str, Any] = ledger_settings(config)
    assert (shown["max_idempotency_keys"], shown["max_refusal_records"]) == (7, 0)


@pytest.mark.parametrize("flag", ["--max-idempotency-keys", "--max-refusal-records"])
@pytest.mark.parametrize(
    ("value", "message"),
    [("-1", "must be at least 0, not -1"), ("many", "must be a whole number, not 'many'"), ("1.5", "a whole number")],
)
def test_invalid_bounds(flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid number of keys or records is refused by the name of its flag."""
    with pytest.raises(SystemExit):
        config_of(f"{flag}={value}")
    error = capsys.readouterr().err
    assert flag in error and message in error


def test_folder_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder is refused, where it would be the one that the command runs in, with books begun anew there."""
    parsers = [command.make_parser() for command in (serve_command, ledger, explain_command, run_batch_command)]
    for parser, before in zip(parsers, ([], ["verify"], [], []), strict=True):
        with pytest.raises(SystemExit):
            parser.parse_args([*before, "--data-dir", ""])
        assert "--data-dir: must name a folder, not ''" in capsys.readouterr().err


def test_webhook() -> None:
    """The key is taken from the environment, which children inherit, and settings show neither it nor the path."""
    environment = {"QUIPU_USAGE_WEBHOOK_KEY": "s3cret"}
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    config = ledger_config(parser.parse_args(["--usage-webhook", "https://meter.example/in?token=t0"]), environment)
    assert config.webhook is not None and (config.webhook.key, environment) == ("s3cret", {})
    assert "s3cret" not in repr(config)
    assert ledger_settings(config)["usage_webhook"] == "meter.example"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("meter.example", "invalid URL"),
        ("ftp://meter.example/", "invalid URL"),
        ("http://", "invalid URL"),
        ("http://host:99999/", "invalid URL"),
        ("http://[::1", "invalid URL"),
        ("https://me:pw@meter.example/", "QUIPU_USAGE_WEBHOOK_KEY"),
    ],
)
def test_invalid_webhook(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL that is none, or has a password, is refused by the name of its flag, and the password is not repeated."""
    with pytest.raises(SystemExit):
        config_of("--usage-webhook", url)
    error = capsys.readouterr().err
    assert "--usage-webhook" in error and message in error and ":pw@" not in error
