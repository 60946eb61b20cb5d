"""The flags of the engine's settings, made from their declarations (`quipu/actors/config/runtime_config.py`).

Used by `serve_flags.py`, which places them among the flags of the web layer. A value outside of a setting's bounds is
refused; argparse puts the flag's name before the message.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Final

import attrs
import msgspec

from quipu.actors.config.declarations import Bounds, Setting
from quipu.actors.config.engine_roles import EngineRole, are_apart
from quipu.actors.config.runtime_config import SETTINGS

from .kv_events_flag import parse_kv_events
from .one_line_parser import filled

GROUPS = {
    "engine": "engine, weights and KV cache",
    "executor": "engine, weights and KV cache",
    "tiers": "tiers of the KV cache below the device",
    "speculation": "speculative decoding",
    "adapters": "adapters",
    "text": "prompts, grammars and tools",
    "events": "events of the cache",
    "supervision": "several engines, and routing",
    "router": "several engines, and routing",
    "cache": "several engines, and routing",
    "cluster": "Ray cluster",
    "log": "requests, traces and the log",
}
"""Titles in `--help` and in the documents, by the groups of settings."""

_ALIASES: Mapping[str, Mapping[str, str]] = {"dtype": {"half": "float16", "float": "float32"}}
"""vLLM's names of values, by setting."""
_UNSET: Mapping[str, tuple[str, ...]] = {"max_model_len": ("auto", "-1")}
"""Values of vLLM's that stand for no value, by setting."""
_MOST: Final = (1 << 63) - 1
"""The largest whole number that an engine can be told, or a database can keep."""
_REPRESENTED: Final = Bounds(maximum=_MOST)
_COUNT = re.compile(r"(\d{1,30})(?:(\.\d+)?([kmg])|([KMG]))")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(iB|B)?|B)?")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
MAX_PASS_COSTS = 64
RAY = "ray:"
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@attrs.frozen
class EngineCounts:
    """The value of `--engines`."""

    count: int
    roles: tuple[EngineRole, ...] = ()
    """One for each engine, if any has another than `mixed`."""
    on_ray: bool = False
    """On the nodes of a Ray cluster."""


def add_settings(add: Callable[..., Any], group: str) -> None:
    """Add the flags of one group of settings with `add`, in the order of their declarations."""
    for setting in SETTINGS:
        if setting.group == group:
            _add(add, setting)


def add_setting(add: Callable[..., Any], attribute: str) -> None:
    """Add the flag of one setting, for a command that has few of them."""
    _add(add, next(setting for setting in SETTINGS if setting.attribute == attribute))


def _add(add: Callable[..., Any], setting: Setting) -> None:
    options: dict[str, Any] = {"default": setting.default, "help": _help(setting)}
    if setting.reader == "switch":
        options["action"] = argparse.BooleanOptionalAction
    else:
        metavar = setting.metavar or ("N" if setting.reader in ("integer", "number") and not setting.choices else None)
        options |= {"type": _reader(setting), "metavar": metavar}
    if setting.choices:
        options["choices"] = setting.choices
    add(*setting.flags, **options)


def _reader(setting: Setting) -> Callable[[str], Any]:
    """Return the parser of a setting's values, by vLLM's names too."""
    read, aliases = _READERS[setting.reader](setting.bounds), _ALIASES.get(setting.attribute, {})
    unset = _UNSET.get(setting.attribute, ())
    return lambda text: None if text in unset else read(aliases.get(text, text))


def _help(setting: Setting) -> str:
    if not setting.help:
        return argparse.SUPPRESS
    has_default = setting.default is not None or setting.resolved
    words = f"{setting.help} (default: {setting.default_words()})" if has_default else setting.help
    return words.replace("%", "%%")  # argparse formats it


def integer(bounds: Bounds) -> Callable[[str], int]:
    """Return a parser of whole numbers within `bounds`, which raises ArgumentTypeError.

    As in vLLM, `32k` is 32,000, `25.6k` is 25,600 and `32K` is 32,768.
    """
    return lambda text: _within(_REPRESENTED, _within(bounds, _parse(_whole, text, "a whole number")))


def _whole(text: str) -> int:
    """Raises ValueError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return int(text)
    digits, fraction, decimal, binary = match.groups(default="")
    if binary:
        return int(int(digits) * 1024 ** _POWERS[binary.lower()])
    return int(Decimal(digits + fraction) * 1000 ** _POWERS[decimal])


def number(bounds: Bounds) -> Callable[[str], float]:
    """Return a parser of numbers within `bounds`, which raises ArgumentTypeError."""
    return lambda text: _within(bounds, _parse(float, text, "a number"))


def parse_size(text: str) -> int:
    """Parse `4GiB`, `512MiB`, `1.5GB` or `4294967296` into bytes.

    `K`, `M`, `G`, `T`, alone or with `iB`, are powers of 1024; `kB`, `MB`, `GB`, `TB` and single lower-case letters are
    powers of 1000, as in vLLM. Raises ArgumentTypeError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, letter, ending = match.groups(default="")
        is_decimal = ending == "B" or (ending == "" and letter.islower())
        size = int(Decimal(number) * (1000 if is_decimal else 1024) ** _POWERS.get(letter.lower(), 0))
        if 0 < size <= _MOST:
            return size
    raise argparse.ArgumentTypeError(f"must be a size such as 4GiB or 512MiB, not {text!r}")


def parse_engines(bounds: Bounds, text: str) -> EngineCounts:
    """Parse `4` or `prefill:1,decode:3`, or either after `ray:` for engines on the nodes of a Ray cluster.

    Raises ArgumentTypeError.
    """
    on_ray, counts = text.startswith(RAY), text.removeprefix(RAY)
    if ":" not in counts and "," not in counts:
        return EngineCounts(integer(bounds)(counts), on_ray=on_ray)
    numbers: dict[EngineRole, int] = {}
    for part in counts.split(","):
        name, _, number = part.partition(":")
        if name not in tuple(EngineRole):
            named = ", ".join(EngineRole)
            raise argparse.ArgumentTypeError(
                f"must be a number, or numbers by role ({named}) such as prefill:1,decode:3, not {text!r}"
            )
        role = EngineRole(name)
        if role in numbers:
            raise argparse.ArgumentTypeError(f"must name each role once, and {text!r} names {name} twice")
        numbers[role] = integer(Bounds(minimum=1, maximum=bounds.maximum))(number)
    count = _within(bounds, sum(numbers.values()))
    roles = tuple(role for role, number in numbers.items() for _ in range(number))
    return EngineCounts(count, roles if are_apart(roles) else (), on_ray=on_ray)


def parse_resources(text: str) -> dict[str, float]:
    """Parse a JSON object of amounts by the names of Ray's resources. Raises ArgumentTypeError."""
    try:
        resources = msgspec.json.decode(text, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"GPU": 1}}: {error}') from None
    for name, amount in resources.items():
        if not name or not 0 < amount < 1e9:
            raise argparse.ArgumentTypeError(f"the amount of {name!r} must be above 0, not {amount:g}")
    if not resources:
        raise argparse.ArgumentTypeError("must name at least one resource")
    return resources


def parse_ports(text: str) -> tuple[int, int]:
    """Parse a range of ports such as 7600-7607, or a single one. Raises ArgumentTypeError."""
    match = _PORTS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a range of ports such as 7600-7607, not {text!r}")
    port = integer(Bounds(minimum=1, maximum=65535))
    first, last = port(match[1]), port(match[2] or match[1])
    if first > last:
        raise argparse.ArgumentTypeError(f"must begin with the lower port, not {text!r}")
    return first, last


def parse_pass_costs(text: str) -> tuple[tuple[int, float], ...]:
    """Parse what steps cost by their number of tokens, such as 1:20,8:24. Raises ArgumentTypeError."""
    costs: dict[int, float] = {}
    for part in text.split(","):
        tokens, _, cost = part.partition(":")
        costs[integer(Bounds(minimum=1, maximum=1 << 20))(tokens)] = number(Bounds(above=0, maximum=1e9))(cost)
    if len(costs) > MAX_PASS_COSTS:
        raise argparse.ArgumentTypeError(f"must have at most {MAX_PASS_COSTS} numbers of tokens")
    return tuple(sorted(costs.items()))


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names with commas between them. Raises ArgumentTypeError."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names with commas between them, not {text!r}")
    return names


_READERS: Mapping[str, Callable[[Bounds], Callable[[str], Any]]] = {
    "integer": integer,
    "number": number,
    "text": lambda _: filled,
    "size": lambda _: parse_size,
    "kv_events": lambda _: parse_kv_events,
    "engines": lambda bounds: partial(parse_engines, bounds),
    "resources": lambda _: parse_resources,
    "ports": lambda _: parse_ports,
    "pass_costs": lambda _: parse_pass_costs,
    "names": lambda _: parse_names,
}


def _parse(kind: Callable[[str], Any], text: str, expected: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}") from None


def _within(bounds: Bounds, value: Any) -> Any:
    if not bounds.allow(value):
        raise argparse.ArgumentTypeError(f"must be {bounds.words()}, not {value}")
    return value
