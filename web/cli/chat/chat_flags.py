"""The flags of `quipu chat`; those it shares with `quipu bench serve` have the same names and meanings."""

from __future__ import annotations

import argparse
import math

from ..bench.values import positive, url, visible
from ..one_line_parser import OneLineParser
from .slash_commands import help_text


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="quipu chat",
        description="Talk to a served model. The line after each answer says how much of the prompt was cached.",
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--base-url",
        type=url,
        default="http://127.0.0.1:8000",
        help="URL of the server, with or without /v1 (default: %(default)s)",
    )
    add("--model", type=_text, help="model to request (default: the first that GET /v1/models lists)")
    add("--api-key", type=visible, help="sent as a bearer token (default: $OPENAI_API_KEY)")
    add("--system", type=_text, default="", metavar="TEXT", help="system message")
    add("--temperature", type=_temperature, metavar="T", help="(default: the server's)")
    add("--max-tokens", type=positive, metavar="N", help="maximum length of an answer (default: the server's)")
    add(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="send `enable_thinking` to the chat template (default: as the template decides)",
    )
    return parser


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that the locale could not decode
        raise argparse.ArgumentTypeError("not valid UTF-8") from error
    return text


def _temperature(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return value
