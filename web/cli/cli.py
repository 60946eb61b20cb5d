"""The command line: `quipu serve MODEL` and the other commands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import quipu

from .command_output import print_result
from .keys import add_key_actions, run_keys
from .ledger import add_ledger_actions, run_ledger
from .one_line_parser import OneLineParser
from .serve_flags import add_serve_flags
from .usage import add_usage_flags, run_usage

_APART = {
    "audit": ".audit.audit_command",
    "bench": ".bench.command",
    "chat": ".chat.chat_command",
    "doctor": ".doctor.doctor_command",
    "explain": ".explain_command",
    "models": ".models_command",
    "quantize": ".quantize_command",
    "run-batch": ".run_batch_command",
}
"""Commands that no server imports, with flags of their own: the modules of their `main`."""
FIRST_STEPS = """\
quipu serves open-weight models, and reports exactly how many prompt tokens were reused.

  quipu doctor         what this machine can do, and what to fix
  quipu serve demo     serve the small model that is part of the package, on http://127.0.0.1:8000
  quipu chat           talk to it, in another terminal
  quipu usage          what was used, and how much of it came from the cache

`quipu --help` lists all commands, `quipu serve --help` all settings.\
"""
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], object] | None]] = {
    "serve": ("serve a model over the OpenAI and Anthropic APIs", add_serve_flags),
    "bench": ("measure a server or an engine", None),
    "chat": ("talk to a served model", None),
    "audit": ("ask a server whether it tells the truth about its cache", None),
    "ledger": ("verify, export or reconcile the usage ledger", add_ledger_actions),
    "usage": ("show usage by model, key or tenant", add_usage_flags),
    "explain": ("explain what of a request's prompts was cached", None),
    "quantize": ("write a checkpoint with quantized weights", None),
    "run-batch": ("run a file of requests", None),
    "doctor": ("say what this machine can do, and what to fix", None),
    "models": ("list the models on this machine, and which can be served", None),
    "keys": ("create API keys for a key file", add_key_actions),
}
"""What each is for, and what adds its flags unless they are its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `quipu` command; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        return print_result(FIRST_STEPS)
    if argv and argv[0] in _APART:
        code: int = importlib.import_module(_APART[argv[0]], __package__).main(argv[1:])
        return code
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        arguments.parser.refuse_unknown(unknown)
    match arguments.command:
        case "keys":
            return run_keys(arguments)
        case "ledger":
            return run_ledger(arguments, os.environ)
        case "usage":
            return run_usage(arguments, os.environ)
        case _:
            from .serve import run_serve

            return run_serve(arguments)


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu", description=quipu.__doc__.splitlines()[0] if quipu.__doc__ else None)
    parser.add_argument("--version", action="version", version=f"quipu {quipu.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, add_flags) in _COMMANDS.items():
        if add_flags is None:
            commands.add_parser(name, help=f"{text}: `quipu {name} --help`")
            continue
        # Another server's flag may be the beginning of one of ours that means something else.
        command = commands.add_parser(name, help=text, allow_abbrev=name != "serve")
        add_flags(command)
        command.set_defaults(parser=command)  # says which flags there are if one is unknown
    return parser


if __name__ == "__main__":
    sys.exit(main())
