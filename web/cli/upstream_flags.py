"""`--upstream` and `--upstream-key-file`: the servers that requests are passed on to, and their keys.

Keys come from a file or the environment, never from a flag, which every user of the machine could read. Errors never
show them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from quipu.actors.config.upstream_config import MAX_UPSTREAMS, UpstreamConfig

UPSTREAM_KEY_VARIABLE = "QUIPU_UPSTREAM_KEY"
MAX_KEY_FILE_BYTES = 1 << 20
_OPTIONS = {"kv-events": "kv_events", "tokenizer": "tokenizer"}
_SWITCHES = {"continuous-usage": "continuous_usage"}


class UpstreamError(Exception):
    """The upstreams cannot be used as configured. The message says why."""


def add_upstream_flags(add: Callable[..., Any]) -> None:
    """Add the flags of `quipu serve` with `add`."""
    add(
        "--upstream",
        type=parse_upstream,
        action="append",
        default=[],
        metavar="URL[,OPTION...]",
        help="pass requests on to this server with the OpenAI API, keeping the books here; may be repeated; options: "
        "kv-events=tcp://HOST:PORT, where it publishes what it has cached, tokenizer=FOLDER, its tokenizer, and "
        "continuous-usage, if it accepts continuous_usage_stats (docs/operate/upstreams.md)",
    )
    add(
        "--upstream-key-file",
        type=Path,
        metavar="FILE",
        help="keys of the upstreams: a JSON object of keys by URL, or lines with a URL and its key; "
        f"${UPSTREAM_KEY_VARIABLE} is the key of all others",
    )


def parse_upstream(text: str) -> UpstreamConfig:
    """Parse the value of one `--upstream`. Raises ArgumentTypeError."""
    url, *options = text.split(",")
    values: dict[str, Any] = {}
    for option in options:
        if option in _SWITCHES:
            values[_SWITCHES[option]] = True
            continue
        name, separator, value = option.partition("=")
        if name not in _OPTIONS or not separator or not value:
            known = ", ".join((*(f"{name}=..." for name in _OPTIONS), *_SWITCHES))
            raise argparse.ArgumentTypeError(f"unknown option {option!r}; there are {known}")
        if name == "kv-events" and not value.startswith(("tcp://", "ipc://")):
            raise argparse.ArgumentTypeError(f"kv-events must be tcp://HOST:PORT or ipc://PATH, not {value!r}")
        values[_OPTIONS[name]] = value
    return UpstreamConfig(url=_base_of(url), **values)


def _base_of(text: str) -> str:
    """Return a URL without `/v1` at its end."""
    try:
        url = urlsplit(text)
        has_address = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        has_address = False
    if not has_address or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("must be http:// or https://, a host, and perhaps a port and a path")
    if "@" in url.netloc or url.query or url.fragment:
        raise argparse.ArgumentTypeError("a URL has no user, password, query or fragment here; see --upstream-key-file")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def read_upstreams(arguments: argparse.Namespace, environment: MutableMapping[str, str]) -> tuple[UpstreamConfig, ...]:
    """Return the upstreams with their keys. Removes the key from `environment`, which children inherit.

    Raises UpstreamError.
    """
    for_all = environment.pop(UPSTREAM_KEY_VARIABLE, None)
    configs: list[UpstreamConfig] = arguments.upstream
    if len(configs) > MAX_UPSTREAMS:
        raise UpstreamError(f"there may be at most {MAX_UPSTREAMS} upstreams")
    if len({config.url for config in configs}) < len(configs):
        raise UpstreamError("an --upstream is given twice")
    path: Path | None = arguments.upstream_key_file
    keys = {} if path is None else _read_keys(path)
    for url in keys:
        if all(config.url != url for config in configs):
            raise UpstreamError(f"{path} has a key for a URL that is no --upstream")
    if for_all is not None:
        _check_key(for_all, UPSTREAM_KEY_VARIABLE)
    return tuple(attrs.evolve(config, key=keys.get(config.url, for_all)) for config in configs)


def _read_keys(path: Path) -> dict[str, str]:
    """Return the keys of a file, by URL."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UpstreamError(f"cannot read {path}: {type(error).__name__}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise UpstreamError(f"{path} is larger than {MAX_KEY_FILE_BYTES} bytes")
    pairs: list[tuple[str, str]] = []
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise UpstreamError(f"{path} is not valid JSON") from None
        pairs = list(values.items())
    else:
        for line in text.splitlines():
            words = line.split()
            if words and not words[0].startswith("#"):
                if len(words) != 2:
                    raise UpstreamError(f"{path}: a line must have a URL and a key")
                pairs.append((words[0], words[1]))
    keys: dict[str, str] = {}
    for url, key in pairs:
        _check_key(key, str(path))
        try:
            keys[_base_of(url)] = key
        except argparse.ArgumentTypeError:
            raise UpstreamError(f"{path} has an invalid URL") from None
    return keys


def _check_key(key: object, where: str) -> None:
    if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UpstreamError(f"{where}: a key must be printable ASCII without spaces")
