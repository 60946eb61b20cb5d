"""The command line: `quipu serve MODEL` and the other commands.

A command's modules are imported when it runs, so that each loads only what it needs. What must always hold: a mistake
is answered in one line, and a reader that has gone or an interruption ends a command without a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import quipu

from .command_output import EXIT_INTERRUPTED, complain, flush_output, print_result
from .one_line_parser import OneLineParser

FIRST_STEPS = """\
quipu serves open-weight models, and reports exactly how many prompt tokens were reused.

  quipu doctor         what this machine can do, and what to fix
  quipu serve demo     serve the small model that is part of the package, on http://127.0.0.1:8000
  quipu chat           talk to it, in another terminal
  quipu top            what it does, live
  quipu usage          what was used, and how much of it came from the cache

`quipu --help` lists all commands, `quipu serve --help` all settings.\
"""


class _Command(NamedTuple):
    text: str
    module: str
    """Has `main`, which runs the command, and `make_parser`."""


COMMANDS: Final = {
    "serve": _Command("serve a model over the OpenAI and Anthropic APIs", ".serve_command"),
    "chat": _Command("talk to a served model", ".chat.chat_command"),
    "top": _Command("show what a running server does, live", ".top.top_command"),
    "usage": _Command("show usage by model, key or tenant", ".usage"),
    "explain": _Command("explain what of a request's prompts was cached", ".explain_command"),
    "audit": _Command("ask a server whether it tells the truth about its cache", ".audit.audit_command"),
    "ledger": _Command("verify, export or reconcile the usage ledger", ".ledger"),
    "keys": _Command("create API keys for a key file", ".keys"),
    "run-batch": _Command("run a file of requests", ".run_batch_command"),
    "bench": _Command("measure a server or an engine", ".bench.command"),
    "models": _Command("list the models on this machine, and which can be served", ".models_command"),
    "quantize": _Command("write a checkpoint with quantized weights", ".quantize_command"),
    "completion": _Command("print what makes a shell complete this command line", ".completion_command"),
    "doctor": _Command("say what this machine can do, and what to fix", ".doctor.doctor_command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `quipu` command; return its exit code."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            flush_output()
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader wants no more
        flush_output()
        return 0


def _run(argv: Sequence[str]) -> int:
    if not argv:
        return print_result(FIRST_STEPS)
    name, rest = argv[0], argv[1:]
    if name == "help":
        name, rest = (argv[1], ["--help"]) if len(argv) > 1 else ("--help", [])
    if name in COMMANDS:
        code: int = _module(name).main(rest)
        return code
    parser = make_parser(with_flags=())
    parser.parse_args([name, *rest])
    parser.error("name a command")


def make_parser(with_flags: Collection[str] = ("serve",)) -> OneLineParser:
    """Return the parser of the whole command line, in which these commands have their flags."""
    parser = OneLineParser(prog="quipu", description=quipu.__doc__.splitlines()[0] if quipu.__doc__ else None)
    parser.add_argument("--version", action="version", version=f"quipu {quipu.__version__}")
    parser.epilog = "`quipu COMMAND --help` lists the flags of a command."
    making: Any = _make  # argparse calls it as it would a class
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=making)
    for name, command in COMMANDS.items():
        make = _module(name).make_parser if name in with_flags else None
        commands.add_parser(name, help=command.text, make=make)
    return parser


def _make(*, make: Callable[[], OneLineParser] | None, **options: Any) -> argparse.ArgumentParser:
    parser = OneLineParser(**options) if make is None else make()
    parser.set_defaults(parser=parser)  # says which flags there are if one is unknown
    return parser


def _module(name: str) -> Any:
    return import_module(COMMANDS[name].module, __package__)


if __name__ == "__main__":
    sys.exit(main())
