"""The flags that all clients of a server have, and the variables that hold keys. Parsers raise ArgumentTypeError."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

KEY_VARIABLE = "OPENAI_API_KEY"
ADMIN_KEY_VARIABLE = "QUIPU_ADMIN_KEY"


def add_server_flags(add: Callable[..., Any]) -> None:
    """Add the flags that name a server, and the key that it wants."""
    add(
        "--base-url",
        type=url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server, with or without /v1 (default: %(default)s)",
    )
    add("--api-key", type=visible, metavar="KEY", help=f"sent as a bearer token (default: ${KEY_VARIABLE})")


def url(text: str) -> str:
    import httpx2  # not by `quipu serve`, whose flags name the same variables

    try:
        parsed = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http or https address")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise argparse.ArgumentTypeError(f"{text!r}: give keys with --api-key or --header, and no query")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def visible(text: str) -> str:
    """Return a value that is allowed in a header."""
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("a header must be printable ASCII")
    return text
