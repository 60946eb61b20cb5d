"""What the output of all commands has in common: exit codes, errors in one line, text that a terminal may show."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import orjson

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def complain(message: object, code: int = EXIT_USAGE) -> int:
    """Print an error, and return the exit code."""
    print(f"quipu: {message}", file=sys.stderr)
    return code


def print_result(text: str) -> int:
    """Print the result, and return the exit code: 0, even if its reader has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)
    return 0


def indented(value: object) -> bytes:
    """Return a value as JSON for people, with a line break at its end."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def silence(stream: TextIO) -> None:
    """Discard what a stream whose reader has gone still holds, so that its flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def first_leaf(error: BaseException) -> BaseException:
    """Return the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
