"""Collects every name by which others know the server; `python -m tests.wire_names --write` writes the list of them.

Metrics, log events, fields of requests, answers and records, headers, codes of errors, flags, routes, variables of the
environment: whoever runs, bills or asks a server relies on them, so none may change with the code behind it. The list
is `wire_names.json`; `test_wire_names.py` compares it with what the code has now.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

# What is taken from the code by its path: all of it stands here, and in `tests/web/fakes.py`.
from quipu.web.app import make_app
from tests.web.fakes import FakeDesk
from tests.wire_requests import request_fields
from tests.wire_server import server_names
from tests.wire_source import SourceNames

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".json")
COMMAND = "python -m tests.wire_names --write"
Names = dict[str, Any]


class _Parser(Exception):
    """Thrown out of a command by its parser, before it does anything."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def collect(folder: Path) -> Names:
    """All names, of this code and of a server that runs in `folder`."""
    source = SourceNames(ROOT)
    return {
        "flags": flags(),
        "routes": routes(),
        "log events": source.log_events(),
        "events and attributes": source.dotted(),
        "error codes and types": source.error_words(),
        "headers": source.headers(),
        "environment": source.variables(),
        "enums": source.enums(),
        "request fields": request_fields(source.words()),
        **server_names(folder, _main()),
    }


def routes() -> list[str]:
    """Every rule with the methods that are not the same everywhere."""
    app = make_app(FakeDesk(), usage=mock.Mock())
    return sorted(
        f"{' '.join(sorted((rule.methods or set()) - {'HEAD', 'OPTIONS'}))} {rule.rule}"
        for rule in app.url_map.iter_rules()
    )


def flags() -> Names:
    """The flags of every subcommand with their kinds, choices and defaults."""
    main = _main()
    found: Names = {}
    for argv in (["serve"], ["bench", "serve"], ["bench", "latency"], ["bench", "throughput"]):
        parser = _parser_of(main, argv)
        for command, inner in _commands(parser):
            found.setdefault(command, set()).update(map(_describe, inner._actions))
    return {command: sorted(described) for command, described in found.items()}


def _main() -> Any:
    """The command `quipu`, as an installation finds it."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["quipu"].partition(":")
    return getattr(import_module(module), name)


def _parser_of(main: Any, argv: list[str]) -> argparse.ArgumentParser:
    def give_away(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", give_away):
        try:
            main(argv)
        except _Parser as given:
            return given.parser
    raise AssertionError(f"{argv} was not parsed")


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those of its subcommands, by what has to be typed."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _commands(inner)


def _describe(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or action.dest
    kind = type(action)
    is_ours = kind.__module__ != argparse.__name__  # what it is called is nobody's business
    said = [name, "own action" if is_ours else kind.__name__.strip("_")] if action.option_strings else [name]
    if action.choices is not None:
        said.append(f"choices {' '.join(map(str, action.choices))}")
    if action.nargs is not None:
        said.append(f"nargs {action.nargs}")
    if action.default not in (None, argparse.SUPPRESS):
        said.append(f"default {action.default!r}")
    return ", ".join(said)


def flatten(names: Any, path: str = "") -> set[str]:
    """One line a name: where it stands, and the name itself."""
    if isinstance(names, dict):
        return {line for key, inner in names.items() for line in (f"{path}{key}", *flatten(inner, f"{path}{key}: "))}
    return {f"{path}{name}" for name in names}


def differences(before: Names, now: Names) -> list[str]:
    """What vanished from the list and what appeared, a line each."""
    old, new = flatten(before), flatten(now)
    lines = [("vanished", line) for line in old - new] + [("appeared", line) for line in new - old]
    return [f"{what}: {line}" for what, line in sorted(lines, key=lambda pair: (pair[1], pair[0]))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wire_names", description="Names that others rely on.")
    parser.add_argument("--write", action="store_true", help=f"write {LIST.name} anew (default: say what differs)")
    is_writing = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        names = collect(Path(folder))
    before = json.loads(LIST.read_text()) if LIST.exists() else {}
    changes = differences(before, names)
    print(*changes, sep="\n")
    if is_writing:
        LIST.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n")
    return 0 if is_writing or not changes else 1


if __name__ == "__main__":
    sys.exit(main())
