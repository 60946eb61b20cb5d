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
        print(text)
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        return _complain_unwritable(error)
    return flush_output()


def flush_output() -> int:
    """Write what stdout still holds, and return the exit code: 0, even if its reader has gone."""
    try:
        if sys.stdout is not None:  # it was closed before the process began
            sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        return _complain_unwritable(error)
    return 0


def _complain_unwritable(error: OSError) -> int:
    silence(sys.stdout)
    return complain(f"cannot write the output: {error.strerror}", EXIT_FAILED)


def indented(value: object) -> bytes:
    """Return a value as JSON for people, with a line break at its end."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def silence(stream: TextIO) -> None:
    """Discard what a stream whose reader has gone still holds, so that its flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)
