"""Parses the command lines of the documents with the programs' own parsers, and runs nothing of them.

A synopsis, such as `python -m bench.sse [--streams 1 16] [--model FOLDER]`, stands for command lines: `spelled_out`
yields one for each value that can be chosen, with all that may be left out unless that names a value in capitals.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest import mock

from quipu.web.cli.cli import main as quipu

SYNOPSIS = re.compile(r"\s\[(?:-|[A-Z])|\w\|\w")
"""What may be left out, or chosen: no shell reads it as it is meant."""
_OPTIONAL = re.compile(r" \[([^\]]*)\]")
_NAMED = re.compile(r"(?<![\w/.-])[A-Z]+(?![\w/.=-])|\.\.\.|…")
"""A value that is named and not given."""
_ELIDED = re.compile(r" --[\w-]+ (?:\.\.\.|…)")


class NotAsDocumentedError(Exception):
    """A page shows something that does not work."""


class _Parsed(Exception):
    """Ends a command when its arguments are parsed."""


def spelled_out(line: str) -> Iterator[str]:
    """Yield the command lines that a synopsis stands for, or the line itself, without its comment."""
    line = _ELIDED.sub("", re.sub(r"\s+#.*", "", line))
    line = _OPTIONAL.sub(lambda found: "" if _NAMED.search(found[1]) else f" {found[1]}", line)
    choices = [[one for one in word.split("|") if not _NAMED.fullmatch(one)] or [word] for word in line.split(" ")]
    for number in range(max(map(len, choices))):
        yield " ".join(words[min(number, len(words) - 1)] for words in choices)


def parse(command: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> None:
    """Call a command until its arguments are parsed. Raises NotAsDocumentedError if it does not accept them."""
    with (
        _stopping_after_parsing(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            command(list(argv))
        except _Parsed:
            pass
        except SystemExit as left:
            if left.code:
                raise NotAsDocumentedError(err.getvalue().strip()) from None


def parse_module(words: Sequence[str]) -> None:
    """Parse the arguments of a module that is run with `-m`. Raises NotAsDocumentedError."""
    main, argv = main_of(words)
    on_sigterm = signal.getsignal(signal.SIGTERM)  # some benchmarks set it first of all
    try:
        with mock.patch.object(sys, "argv", argv):
            parse(lambda _: main(), argv[1:])
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def check_flags_exist(line: str) -> None:
    """Check that a command of ours has the flags and choices that a synopsis names. Raises NotAsDocumentedError."""
    words = re.sub(r"\s+#.*", "", line).split()
    begin = itertools.takewhile(lambda word: re.match(r"[a-z-][\w.-]*$", word) and word[:2] != "--", words)
    command = tuple(begin)
    text = _help_of(command)
    if not text:
        raise NotAsDocumentedError(f"there is no {' '.join(command)}")
    flags = re.findall(r"--[a-z][\w-]*", line)
    values = [value for found in re.findall(r"--[\w-]+ ([\w-]+(?:\|[\w-]+)+)", line) for value in found.split("|")]
    if unknown := [word for word in [*flags, *values] if word not in text]:
        raise NotAsDocumentedError(f"{' '.join(command)} has no {', '.join(unknown)}")


@cache
def _help_of(command: Sequence[str]) -> str:
    """Return what a command of ours, or a module, prints for `--help`: nothing if it is not there."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        if command[0] == "quipu":
            quipu([*command[1:], "--help"])
        else:
            main, argv = main_of([*command[2:], "--help"])
            with mock.patch.object(sys, "argv", argv):
                main()
    return out.getvalue()


def main_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the `main` of a module that is run with `-m`, and the arguments that it sees."""
    try:
        spec = importlib.util.find_spec(words[0])
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise NotAsDocumentedError(f"there is no module {words[0]}")
    name = f"{words[0]}.__main__" if spec.submodule_search_locations else words[0]
    return importlib.import_module(name).main, [name, *words[1:]]


@contextlib.contextmanager
def _stopping_after_parsing() -> Iterator[None]:
    """Have every outermost parser raise _Parsed once its arguments are valid."""
    parse_known, depth = argparse.ArgumentParser.parse_known_args, [0]

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        depth[0] += 1
        try:
            parsed, unknown = parse_known(parser, args, namespace)
        finally:
            depth[0] -= 1
        if depth[0]:
            return parsed, unknown
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        yield
