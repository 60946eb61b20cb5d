"""`quipu completion SHELL`: a script by which a shell completes commands, flags, their values, files and models.

shtab makes it from the parsers of all commands. The script holds everything but the names of files and models, which
the shell reads itself, so that completing starts no Python. What a value is, a flag's metavar says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final

import shtab

from .cli import COMMANDS
from .cli import make_parser as make_whole_parser
from .command_output import print_result
from .one_line_parser import OneLineParser, actions_of, commands_of
from .serve_flags import add_serve_flags

SHELLS: Final = ("bash", "zsh", "fish")
_WITH_SERVE_FLAGS: Final = ("quipu bench latency", "quipu bench throughput", "quipu run-batch")
"""Commands that pass flags on to an engine or a server of their own."""

# Names of models in the hub's cache, which may hold whatever somebody named a folder: they are only printed, and only
# if they consist of what the hub allows.
_HUB: Final = "${HF_HUB_CACHE:-${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}/hub}"
_BASH: Final = f"""
# $1=COMP_WORDS[1]
_quipu_model_or_file() {{
  local entry name
  for entry in demo "{_HUB}"/models--*; do
    name="${{entry##*/models--}}"
    name="${{name//--//}}"
    [[ $name =~ ^[A-Za-z0-9._/-]+$ && $name != /* && $name == "$1"* ]] && printf '%s\\n' "$name"
  done
  compgen -f -- "$1"
}}
"""
_ZSH: Final = f"""
_quipu_model_or_file() {{
  local entry
  local -a names=(demo)
  for entry in "{_HUB}"/models--*(N:t); do
    entry="${{entry#models--}}"
    [[ $entry =~ '^[A-Za-z0-9._-]+$' ]] && names+=("${{entry//--//}}")
  done
  compadd -a names
  _files
}}
"""
_FISH: Final = """
function _quipu_model_or_file
  set -l hub "$HF_HUB_CACHE"
  test -n "$hub"; or set hub "$HF_HOME/hub"
  test "$hub" != /hub; or set hub "$XDG_CACHE_HOME/huggingface/hub"
  test "$hub" != /huggingface/hub; or set hub "$HOME/.cache/huggingface/hub"
  echo demo
  for entry in "$hub"/models--*
    string replace -r '.*/models--' '' -- $entry | string match -r '^[A-Za-z0-9._-]+$' | string replace -a -- -- /
  end
  __fish_complete_path (commandline -ct)
end
"""
_MODEL: Final = {
    "bash": "_quipu_model_or_file",
    "zsh": "_quipu_model_or_file",
    "fish": "(_quipu_model_or_file)",
    "preamble": {"bash": _BASH, "zsh": _ZSH, "fish": _FISH},
}
_COMPLETED_AS: Final[dict[str, Any]] = {
    "MODEL": _MODEL,
    "FOLDER": shtab.DIRECTORY,
    **dict.fromkeys(("FILE", "KEYFILE", "PATH", "IN", "OUT"), shtab.FILE),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `completion`. Returns the exit code."""
    arguments: argparse.Namespace = make_parser().parse_args(argv)
    return print_result(make_script(arguments.shell))


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="quipu completion",
        description="Print a script that makes a shell complete this command line (docs/operate/command-line.md).",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


def make_script(shell: str) -> str:
    """Return the script for a shell."""
    whole = make_whole_parser(with_flags=COMMANDS)
    for parser in _all_parsers(whole):
        if parser.prog in _WITH_SERVE_FLAGS:
            _add_flags_of_serve(parser)
        for action in actions_of(parser):
            if isinstance(action.metavar, str) and action.metavar in _COMPLETED_AS:
                vars(action)["complete"] = _COMPLETED_AS[action.metavar]  # where shtab looks
    return shtab.complete(whole, shell)


def _all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for command in commands_of(parser).values():
        yield from _all_parsers(command)


def _add_flags_of_serve(parser: argparse.ArgumentParser) -> None:
    """Add those that the command has not itself."""
    serving = OneLineParser(add_help=False)
    add_serve_flags(serving)
    known = {option for action in actions_of(parser) for option in action.option_strings}
    for action in actions_of(serving):
        if action.option_strings and known.isdisjoint(action.option_strings):
            parser._add_action(action)  # noqa: SLF001 - argparse copies flags only from parents
