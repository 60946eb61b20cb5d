"""Parsers of flag values, and the flags that all clients of a server have. Parsers raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import httpx2
import orjson

from quipu.actors.config.declarations import Bounds

from ..setting_flags import integer, number
from .report import METRICS

positive = integer(Bounds(minimum=1))
count = integer(Bounds(minimum=0))
rate = number(Bounds(above=0))
KEY_VARIABLE = "OPENAI_API_KEY"


def add_server_flags(add: Callable[..., Any]) -> None:
    """Add the flags that name a server, and the key that it wants."""
    add(
        "--base-url",
        type=url,
        default="http://127.0.0.1:8000",
        help="URL of the server, with or without /v1 (default: %(default)s)",
    )
    add("--api-key", type=visible, help=f"sent as a bearer token (default: ${KEY_VARIABLE})")


def url(text: str) -> str:
    try:
        parsed = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http or https address")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise argparse.ArgumentTypeError(f"{text!r}: give keys with --api-key or --header, and no query")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    visible(text)
    return name.strip(), value.strip()


def visible(text: str) -> str:
    """Return a value that is allowed in a header."""
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("a header must be printable ASCII")
    return text


def json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"unknown metric {name!r} (one of {', '.join(METRICS)})")
    return names


def percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles must be from 0 to 100")
    return values


def finite(text: str) -> float:
    if not (value := rate(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not finite")
    return value


def ratio(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0 and below 1")
    return value
