"""The flags of the engine's settings, made from their declarations (`quipu/actors/config.py`).

Used by `serve_flags.py`, which places them among the flags of the web layer. What must always hold: a value outside of
a setting's bounds is refused before anything starts, with the flag's name (which argparse puts before the message).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from quipu.actors.config import SETTINGS
from quipu.actors.declarations import Bounds, Setting

from .kv_events_flag import parse_kv_events
from .sizes import parse_size


def add_settings(command: argparse.ArgumentParser, group: str) -> None:
    """Add the flags of one group of settings, in the order of their declarations."""
    for setting in SETTINGS:
        if setting.group == group:
            _add(command, setting)


def _add(command: argparse.ArgumentParser, setting: Setting) -> None:
    options: dict[str, Any] = {"default": setting.default, "help": _help(setting)}
    if setting.reader == "switch":
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": _READERS[setting.reader](setting.bounds), "metavar": setting.metavar}
    if setting.choices:
        options["choices"] = setting.choices
    command.add_argument(*setting.flags, **options)


def _help(setting: Setting) -> str:
    if not setting.help:
        return argparse.SUPPRESS
    has_default = setting.default is not None or setting.resolved
    words = f"{setting.help} (default: {setting.default_words()})" if has_default else setting.help
    return words.replace("%", "%%")  # argparse formats it


def integer(bounds: Bounds) -> Callable[[str], int]:
    """Return a parser of whole numbers within `bounds`, which raises ArgumentTypeError."""
    return lambda text: _within(bounds, _parse(int, text, "a whole number"))


def number(bounds: Bounds) -> Callable[[str], float]:
    """Return a parser of numbers within `bounds`, which raises ArgumentTypeError."""
    return lambda text: _within(bounds, _parse(float, text, "a number"))


_READERS: Mapping[str, Callable[[Bounds], Callable[[str], Any]]] = {
    "integer": integer,
    "number": number,
    "text": lambda _: str,
    "size": lambda _: parse_size,
    "kv_events": lambda _: parse_kv_events,
}


def _parse(kind: type[Any], text: str, expected: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}") from None


def _within(bounds: Bounds, value: Any) -> Any:
    if not bounds.allow(value):
        raise argparse.ArgumentTypeError(f"must be {bounds.words()}, not {value}")
    return value
