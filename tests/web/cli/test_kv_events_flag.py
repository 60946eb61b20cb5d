"""`--kv-events-config`: the resulting configuration, and invalid fields, which are refused by name."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from quipu.actors.config.engine_config import KvEventsConfig
from quipu.web.cli.cli import main, make_parser
from quipu.web.cli.kv_events_flag import parse_kv_events


def parse(**fields: Any) -> KvEventsConfig | None:
    return parse_kv_events(json.dumps({"enable_kv_cache_events": True, **fields}))


def test_vllm_fields() -> None:
    """Every field of vLLM's flag is accepted."""
    assert parse(
        publisher="zmq",
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
        topic="kv@pod@model",
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
    ) == KvEventsConfig("tcp://*:5557", True, "tcp://*:5558", "kv@pod@model", 10, 20, 30)


def test_defaults() -> None:
    """By default the socket is local and there is no replay."""
    assert parse() == KvEventsConfig()
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557"
    assert KvEventsConfig().replay_endpoint is None


@pytest.mark.parametrize("text", ["{}", '{"enable_kv_cache_events": false, "endpoint": "tcp://*:5557"}'])
def test_disabled(text: str) -> None:
    """Events must be enabled explicitly."""
    assert parse_kv_events(text) is None


def test_null_publisher() -> None:
    """The publisher `null` disables events."""
    assert parse(publisher="null") is None


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("tcp://10.1.2.3:5557", False),
        ("tcp://router:5557", False),
        ("tcp://localhost:5557", False),
    ],
)
def test_bind_or_connect(endpoint: str, binds: bool) -> None:
    """Wildcards, files and loopback addresses are bound, others connected to, unless `bind` is set."""
    config = parse(endpoint=endpoint)
    assert config is not None and config.binds is binds
    config = parse(endpoint=endpoint, bind=not binds)
    assert config is not None and config.binds is not binds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpiont": "tcp://*:1"}, "unknown field `endpiont`"),
        ({"publisher": "kafka"}, r"kafka.*\$.publisher"),
        ({"endpoint": "*:5557"}, "`endpoint` must be tcp://HOST:PORT"),
        ({"endpoint": "inproc://x"}, "`endpoint` must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://host"}, "`endpoint` needs a host and a port"),
        ({"endpoint": "tcp://host:70000"}, "`endpoint` needs a host and a port"),
        ({"replay_endpoint": "udp://*:1"}, "`replay_endpoint` must be"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "`endpoint` and `replay_endpoint` are the same"),
        ({"buffer_steps": 0}, r">= 1 - at `\$.buffer_steps`"),
        ({"hwm": "many"}, r"got `str` - at `\$.hwm`"),
        ({"max_queue_size": 2**40}, r"\$.max_queue_size"),
        ({"topic": None}, r"\$.topic"),
    ],
)
def test_invalid_fields(fields: dict[str, Any], message: str) -> None:
    """An error names the field."""
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(**fields)


def test_invalid_json(capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line the error names the flag."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--kv-events-config", "yes"])
    assert "argument --kv-events-config: " in capsys.readouterr().err


def test_without_prefix_caching(capfd: pytest.CaptureFixture[str]) -> None:
    """Events without prefix caching are refused."""
    assert main(["serve", "--no-enable-prefix-caching", "--kv-events-config", '{"enable_kv_cache_events": true}']) == 2
    assert "--kv-events-config needs prefix caching" in capfd.readouterr().err
