"""Collect every name that others know the server by; `python -m tests.wire_names --write` writes the list.

Metrics, log events, fields of requests, responses and records, headers, error codes, flags, routes, environment
variables: operators, billing and clients rely on them, so none may change along with the code. The list is
`wire_names.json`; `test_wire_names.py` compares it with the current code.
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

# The only imports from the product, besides those of `tests/web/fakes.py`.
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
    """Raised by a command's parser before the command does anything, to get the parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def collect(folder: Path) -> Names:
    """Collect all names, from the code and from a server that runs in `folder`."""
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
    """Return every URL rule with its methods, except HEAD and OPTIONS."""
    app = make_app(FakeDesk(), usage=mock.Mock(), store=mock.Mock(), batches=mock.Mock())
    return sorted(
        f"{' '.join(sorted((rule.methods or set()) - {'HEAD', 'OPTIONS'}))} {rule.rule}"
        for rule in app.url_map.iter_rules()
    )


def flags() -> Names:
    """Return the flags of every subcommand with their actions, choices and defaults."""
    main = _main()
    found: Names = {}
    bench = [["bench", command] for command in ("serve", "latency", "throughput")]
    alone = [["--version"], ["serve"], ["chat"], ["explain", "x"], ["usage"], ["ledger", "x"], ["keys", "x"]]
    alone += [["doctor"], ["models"], ["quantize", "x"], ["run-batch"], ["audit"], ["top"], ["completion", "x"]]
    for argv in (*alone, *bench):
        parser = _parser_of(main, argv)
        for command, inner in _commands(parser):
            found.setdefault(command, set()).update(map(_describe, inner._actions))
    return {command: sorted(described) for command, described in found.items()}


def _main() -> Any:
    """Return the entry point of the command `quipu`."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["quipu"].partition(":")
    return getattr(import_module(module), name)


def _parser_of(main: Any, argv: list[str]) -> argparse.ArgumentParser:
    def intercept(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parser(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", intercept):
        try:
            main(argv)
        except _Parser as given:
            return given.parser
    raise AssertionError(f"{argv} was not parsed")


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a parser and those of its subcommands, with the command line that selects them."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _commands(inner)


def _describe(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or action.dest
    kind = type(action)
    is_ours = kind.__module__ != argparse.__name__  # the name of the class is not part of the interface
    said = [name, "own action" if is_ours else kind.__name__.strip("_")] if action.option_strings else [name]
    if action.choices is not None:
        said.append(f"choices {' '.join(map(str, action.choices))}")
    if action.nargs is not None:
        said.append(f"nargs {action.nargs}")
    if action.default not in (None, argparse.SUPPRESS):
        said.append(f"default {action.default!r}")
    return ", ".join(said)


def flatten(names: Any, path: str = "") -> set[str]:
    """Return a line for each name: its place and the name."""
    if isinstance(names, dict):
        return {line for key, inner in names.items() for line in (f"{path}{key}", *flatten(inner, f"{path}{key}: "))}
    return {f"{path}{name}" for name in names}


def differences(before: Names, now: Names) -> list[str]:
    """Return a line for each removed and each added name."""
    old, new = flatten(before), flatten(now)
    lines = [("removed", line) for line in old - new] + [("added", line) for line in new - old]
    return [f"{what}: {line}" for what, line in sorted(lines, key=lambda pair: (pair[1], pair[0]))]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wire_names", description="Collect the names that others rely on."
    )
    parser.add_argument("--write", action="store_true", help=f"rewrite {LIST.name} (default: print the differences)")
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
