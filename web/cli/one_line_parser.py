"""The parser of every command: it reports a mistake in one line that names the nearest word, and exits with 2.

`foreign_flags.py` knows the flags of other servers.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from .foreign_flags import advice_of, advice_of_choice

_MAX_QUOTED = 100


MOST_FLAGS_IN_USAGE = 12
"""Beyond that the first line of a help does not list them."""


class _DefaultsFormatter(argparse.RawDescriptionHelpFormatter):
    """Appends the default of a flag to its help, unless that speaks of it; puts each command on one line."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        optional = [action for action in actions if action.option_strings and not action.required]
        if usage is None and len(optional) > MOST_FLAGS_IN_USAGE:
            others = [action for action in actions if action not in optional]
            shown = [f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in others]
            usage = " ".join(["%(prog)s", *shown, "[FLAG ...]"])
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action.choices, dict):  # argparse forgets that commands are indented
            self._action_max_length += self._indent_increment

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool) or not isinstance(action.default, str | float | int):
            return action.help
        if action.default == argparse.SUPPRESS or action.help is None or "default" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` without the usage in its errors, which for `quipu serve` has a hundred lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _DefaultsFormatter, **options})

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(**{"title": "commands", "metavar": "COMMAND", **options})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(parsed, "parser", self).refuse_unknown(unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not args and (commands := commands_of(self)):
            self.error(f"say which: {', '.join(commands)}")
        # argparse takes -t for -tp and -hf for -h, also without abbreviations, and an unknown flag's value for a model
        known = set(_options(self))
        for name in (word.partition("=")[0] for word in args or () if word.startswith("-")):
            if name not in known:
                self._refuse_foreign(name)
        return super().parse_known_args(args, namespace)

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End the process, saying what to use instead of the first unknown flag."""
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            self.error(f"unexpected argument {_shown(unknown[0])}")
        name = flag.partition("=")[0]
        known = list(_options(self))
        self._refuse_foreign(name)
        near = difflib.get_close_matches(name[:_MAX_QUOTED].replace("_", "-"), known, n=1)
        self.error(f"unknown flag {_shown(name)}" + (f"; did you mean {near[0]}?" if near else ""))

    def _refuse_foreign(self, name: str) -> None:
        """End the process if `quipu serve` is given another server's flag."""
        if self.prog.endswith(" serve") and (advice := advice_of(name)) is not None:
            self.error(f"{name} {advice}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is none of an action's choices, naming the nearest, or all."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value)[:_MAX_QUOTED].lower(), choices, n=1)
        what = "invalid choice" if action.option_strings else "unknown command"
        said = f"{what} {_shown(str(value))!r}; "
        if (advice := advice_of_choice(action.dest, str(value))) is not None:
            said += advice
        else:
            said += f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action if action.option_strings else None, said)

    def error(self, message: str) -> NoReturn:
        line = "".join(char if char.isprintable() else " " for char in message)
        listed = "commands" if commands_of(self) else "flags"
        print(f"{self.prog}: error: {line} (`{self.prog} --help` lists all {listed})", file=sys.stderr)
        sys.exit(2)


def add_command(commands: Any, name: str, text: str, **options: Any) -> Any:
    """Add a command's command, of which `text` says in both helps what it does; return its parser."""
    return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **options)


def actions_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return parser._actions  # noqa: SLF001 - argparse has no public list of them


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the commands of a parser by name; none if it has none."""
    found: Mapping[str, argparse.ArgumentParser] = {}
    for action in actions_of(parser):
        if isinstance(action.choices, dict):
            found = action.choices
    return found


def filled(text: str) -> str:
    """Refuse an empty value, as a variable without one gives: it must not read as "not secured", or "here"."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def folder(text: str) -> str:
    """Check the name of a folder. An empty one, as a variable without a value gives, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder, not ''")
    return text


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the long flags of a parser and of its commands."""
    for action in actions_of(parser):
        if not isinstance(action.choices, dict) and action.help != argparse.SUPPRESS:
            yield from (option for option in action.option_strings if option.startswith("--"))
    for command in commands_of(parser).values():
        yield from _options(command)


def _shown(word: str) -> str:
    return word if len(word) <= _MAX_QUOTED else f"{word[:_MAX_QUOTED]}…"
