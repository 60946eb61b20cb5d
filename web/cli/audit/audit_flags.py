"""The flags of `quipu audit`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from urllib.parse import urlsplit

from ..one_line_parser import OneLineParser
from ..server_flags import KEY_VARIABLE, visible
from .auditor import MAX_PROMPT_TOKENS
from .exchange import PATHS

_DESCRIPTION = """\
Ask a server, any server, whether what it says about cached prompt tokens is true.

It sends prompts of its own to the APIs that the server has, and compares what the answers say with what they can say at
most. The exit code is 1 if something is false, 2 if there is nothing to audit.\
"""


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu audit", description=_DESCRIPTION)
    add = parser.add_argument
    add("url", nargs="?", type=_url, metavar="URL", help="the server, with or without /v1")
    add("--model", help="model to request (default: the first that GET /v1/models lists)")
    apis = ",".join(PATHS)
    add("--api", type=_apis, default=tuple(PATHS), metavar="NAMES", help=f"APIs to audit (default: {apis})")
    add("--key", type=visible, help=f"sent as a bearer token and as x-api-key (default: ${KEY_VARIABLE})")
    add("--other-key", type=visible, metavar="KEY", help="a key of another tenant, who must not find what --key sent")
    add("--header", action="append", type=_header, default=[], metavar="K=V", help="another header; may be repeated")
    add(
        "--metrics-url",
        type=_url,
        metavar="URL",
        help="where the server shows its counters to Prometheus, such as URL/metrics",
    )
    add("--pressure", action="store_true", help="also fill the cache, so that others' prompts are evicted")
    add("--prompt-tokens", type=_length, default=1200, metavar="N", help="approximate length of the prompts")
    add(
        "--prompt-format",
        choices=["auto", "ids", "text"],
        default="auto",
        help="how /v1/completions gets them",
    )
    add("--budget", type=_positive, default=400_000, metavar="TOKENS", help="stop before more tokens are used")
    add("--concurrency", type=_positive, default=4, metavar="N", help="maximum number of requests at a time")
    add("--timeout", type=_seconds, default=120.0, metavar="S", help="time after which a request has failed")
    add("--max-time", type=_seconds, default=3600.0, metavar="S", help="stop after so many seconds")
    add("--json", action="store_true", help="print a JSON object instead of a table")
    add("--html", type=Path, metavar="FILE", help="also write a page")
    add("--compare", nargs="+", type=Path, metavar="FILE", help="print a table of saved JSON instead of an audit")
    add("--quiet", action="store_true", help="no progress")
    return parser


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or not text.isprintable()
        or " " in text
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not an http or https address")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError("give keys with --key or --header, and no query")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _apis(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PATHS:
            raise argparse.ArgumentTypeError(f"unknown API {name!r} (one of {', '.join(PATHS)})")
    return names


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9-]+", name.strip()):
        raise argparse.ArgumentTypeError("not K=V, with a header's name as K")
    visible(value)
    return name.strip(), value.strip()


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _length(text: str) -> int:
    value = _positive(text)
    if value > MAX_PROMPT_TOKENS:
        raise argparse.ArgumentTypeError(f"{value} is more than {MAX_PROMPT_TOKENS}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
