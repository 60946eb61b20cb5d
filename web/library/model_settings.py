"""The settings of an engine, given in Python: `LLM("demo", max_model_len=4096)` is `--max-model-len 4096`.

They are parsed by the flags of `quipu serve`, so that there is one list of names, bounds and defaults. Flags about HTTP
are refused: nothing would come of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import attrs
import orjson

from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.ledger.service import LedgerConfig
from quipu.actors.request_desk.interface import ServingInfo

from ..cli.ledger_flags import ledger_config
from ..cli.one_line_parser import OneLineParser
from ..cli.serve_flags import add_serve_flags
from ..cli.settings import resolve_config

_WITHOUT_EFFECT: Final = frozenset(
    {
        *("host", "port", "max_connections", "max_body_bytes", "max_body_memory", "no_ui", "prices"),
        *("api_key", "admin_key", "key_file", "open_admin", "allowed_hosts", "allowed_origins"),
        *("request_timeout", "shutdown_timeout", "upstream", "upstream_key_file", "otlp_traces_endpoint"),
        *("allow_client_priority", "always_include_usage", "metric_names", "keep_billing_header", "lora_dir"),
    }
)
"""Settings of the HTTP server."""


@attrs.frozen
class Resolved:
    """All that an engine is started with."""

    config: RuntimeConfig
    info: ServingInfo
    ledger: LedgerConfig | None
    """None: usage records are not kept."""


class _SettingsParser(OneLineParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def resolve_settings(model: str, settings: Mapping[str, Any]) -> Resolved:
    """Resolve settings as `quipu serve MODEL` does. Usage records are kept if `data_dir` is given.

    Raises TypeError for an unknown setting, ValueError for an invalid value, CheckpointError, and LedgerError.
    """
    parser = _SettingsParser(prog="quipu", add_help=False, allow_abbrev=False)
    add_serve_flags(parser)
    parser.set_defaults(log_level="warning")
    actions = {option: action for action in parser._actions for option in action.option_strings}  # noqa: SLF001
    words = [model]
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if name in _WITHOUT_EFFECT:
            raise TypeError(f"{name} concerns the HTTP server, which there is none of here")
        if flag not in actions or "-" in name:
            raise TypeError(f"unknown setting {name!r}: settings are the flags of `quipu serve`, with underscores")
        words += _words(flag, actions[flag], value)
    arguments = parser.parse_args(words)
    config, info = resolve_config(arguments)
    ledger = ledger_config(arguments, dict(os.environ)) if settings.get("data_dir") is not None else None
    return Resolved(config, info, ledger)


def _words(flag: str, action: argparse.Action, value: Any) -> list[str]:
    """Return the words of a command line that set a flag."""
    if value is None:
        return []
    if isinstance(action, argparse.BooleanOptionalAction):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if action.nargs == 0:
        return [flag] if value else []
    if isinstance(value, Mapping):
        return [f"{flag}={orjson.dumps(value).decode()}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"{flag}={','.join(map(str, value))}"] if action.nargs is None else [flag, *map(str, value)]
    return [f"{flag}={value}"]
