"""The command line: `quipu serve MODEL` and the other commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import quipu

from .keys import add_key_actions, run_keys
from .ledger import add_ledger_actions, run_ledger
from .one_line_parser import OneLineParser
from .serve_flags import add_serve_flags
from .usage import add_usage_flags, run_usage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `quipu` command; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:  # a client with its own flags, which no server imports
        from .bench.command import main as bench

        return bench(argv[1:])
    if argv[:1] == ["chat"]:  # another client
        from .chat.chat_command import main as chat

        return chat(argv[1:])
    if argv[:1] == ["explain"]:
        from .explain_command import main as explain

        return explain(argv[1:])
    if argv[:1] == ["quantize"]:  # the only command that computes, with torch
        from .quantize_command import main as quantize

        return quantize(argv[1:])
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
    """Return the parser of all commands and flags."""
    parser = OneLineParser(prog="quipu", description=quipu.__doc__.splitlines()[0] if quipu.__doc__ else None)
    parser.add_argument("--version", action="version", version=f"quipu {quipu.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    # Another server's flag may be the beginning of one of ours that means something else.
    serve = commands.add_parser("serve", help="serve a model over the OpenAI and Anthropic APIs", allow_abbrev=False)
    add_serve_flags(serve)
    commands.add_parser("bench", help="measure a server or an engine: `quipu bench --help`")
    commands.add_parser("chat", help="talk to a served model: `quipu chat --help`")
    ledger = commands.add_parser("ledger", help="verify, export or reconcile the usage ledger")
    add_ledger_actions(ledger)
    usage = commands.add_parser("usage", help="show usage by model, key or tenant")
    add_usage_flags(usage)
    commands.add_parser("explain", help="explain what of a request's prompts was cached: `quipu explain --help`")
    commands.add_parser("quantize", help="write a checkpoint with quantized weights: `quipu quantize --help`")
    keys = commands.add_parser("keys", help="create API keys for a key file")
    add_key_actions(keys)
    for command in (serve, ledger, usage, keys):
        command.set_defaults(parser=command)  # says which flags there are if one is unknown
    return parser


if __name__ == "__main__":
    sys.exit(main())
