"""The flags of `quipu serve` about stored responses, with the config made from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quipu.actors.config.declarations import Bounds
from quipu.actors.response_store.response_store import StoreConfig

from .setting_flags import integer, parse_size

OFF = "off"
MAX_TTL_S = 3650 * 86_400
MIN_STORE_BYTES = 1 << 20
_TTL = re.compile(r"([1-9][0-9]{0,9})([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_ttl(text: str) -> int | None:
    """Parse `30d`, `12h`, `90m` or `3600` into seconds, and `off` into None. Raises ArgumentTypeError."""
    if text == OFF:
        return None
    match = _TTL.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_S:
        raise argparse.ArgumentTypeError(f"must be off or a time such as 30d, 12h or 90m, not {text!r}")
    return seconds


def _parse_store_size(text: str) -> int:
    size = parse_size(text)
    if size < MIN_STORE_BYTES:
        raise argparse.ArgumentTypeError(f"must be at least 1MiB, not {text!r}")
    return size


def add_store_flags(add: Callable[..., Any]) -> None:
    ttl_help = (
        "store responses, conversations and chat completions for so long after their last change, such as 30d or 12h "
        "(default: off; docs/use/stored-responses.md)"
    )
    add("--response-store", type=parse_ttl, default=None, metavar="TTL|off", help=ttl_help)
    size_help = "maximum size of all that is stored; beyond it the objects that expire next are deleted (default: 1GiB)"
    add("--response-store-bytes", type=_parse_store_size, default=1 << 30, metavar="SIZE", help=size_help)
    count = partial(add, type=integer(Bounds(minimum=0)))
    count_help = "maximum number of background responses of one tenant at once (default: %(default)s)"
    count("--max-background-responses", default=64, metavar="N", help=count_help)


def store_config(arguments: argparse.Namespace) -> StoreConfig | None:
    """Return the config, None if nothing is stored."""
    if arguments.response_store is None:
        return None
    return StoreConfig(
        data_dir=Path(arguments.data_dir),
        ttl_s=arguments.response_store,
        max_bytes=arguments.response_store_bytes,
        max_background=arguments.max_background_responses,
    )


def store_settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings that `/server_info` shows."""
    return {
        "response_store_ttl": arguments.response_store,
        "response_store_bytes": arguments.response_store_bytes,
        "max_background_responses": arguments.max_background_responses,
    }
