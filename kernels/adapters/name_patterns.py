"""Regular expressions of an adapter's configuration, matched against module names in bounded time.

PEFT matches them with `re`, whose time may be exponential in the length of a name, and they come from whoever made the
adapter. Here `re` only parses them. Matching follows all possibilities at once, as sets of positions, so it takes time
polynomial in the length of a name, and gives up after a fixed number of steps.

What must always hold: where this returns, `re` would return the same; what is not supported is refused by its name.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from ..models.entry_types import shown

_PARSER: Any = importlib.import_module("re._parser")
_MOST_CHARACTERS = 2_000
_MOST_DEPTH = 100
"""Parentheses within each other. Python's own limit of recursion is not ours: libraries change it."""
_MOST_STEPS = 50_000
"""Positions that may be visited for one name; usual patterns need some hundreds."""

_CATEGORIES = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
    "CATEGORY_SPACE": str.isspace,
}


def _depth(pattern: str) -> int:
    """Return how many parentheses of an expression are open at once, at most; those in sets count as well."""
    depth = deepest = 0
    for character in re.sub(r"\\.", "", pattern, flags=re.DOTALL):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


class NamePattern:
    """One expression."""

    def __init__(self, entry: str, pattern: str) -> None:
        """Parse it. Raises ValueError naming the entry of the configuration."""
        self._said = f"adapter_config.json: {entry}: {shown(pattern)}"
        if len(pattern) > _MOST_CHARACTERS:
            raise ValueError(f"{self._said} has {len(pattern)} characters, at most {_MOST_CHARACTERS} are supported")
        if _depth(pattern) > _MOST_DEPTH:
            raise ValueError(f"{self._said} is nested too deeply")
        try:
            self._parsed = _PARSER.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{self._said} is not a regular expression: {error}") from None
        if self._parsed.state.flags != re.UNICODE.value:
            raise ValueError(f"{self._said} sets flags, which is not supported")
        self._num_steps = 0

    def matches(self, name: str) -> bool:
        """Return whether it matches the whole name. Raises ValueError for what is not supported, or takes too long."""
        return self._reaches_end(name, {0})

    def matches_end(self, name: str) -> bool:
        """Return whether it matches the whole name, or all of it after one of its dots; raises as `matches` does."""
        return self._reaches_end(name, {0, *(at + 1 for at, character in enumerate(name) if character == ".")})

    def _reaches_end(self, name: str, starts: set[int]) -> bool:
        self._num_steps = 0
        try:
            return len(name) in self._ends(self._parsed, name, starts)
        except RecursionError:
            raise ValueError(f"{self._said} is nested too deeply") from None

    def _ends(self, sequence: Any, name: str, starts: set[int]) -> set[int]:
        """Return where matches that begin at one of `starts` may end."""
        for operation, argument in sequence:
            self._num_steps += 1 + len(starts)
            if self._num_steps > _MOST_STEPS:
                raise ValueError(f"{self._said} takes too long to match")
            starts = self._ends_of(str(operation), argument, name, starts)
        return starts

    def _ends_of(self, operation: str, argument: Any, name: str, starts: set[int]) -> set[int]:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                inside = (at for at in starts if at < len(name))
                return {at + 1 for at in inside if self._is_one(operation, argument, name[at])}
            case "BRANCH":
                return set().union(*(self._ends(branch, name, starts) for branch in argument[1]))
            case "SUBPATTERN" if not argument[1] and not argument[2]:
                return self._ends(argument[3], name, starts)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeated(argument, name, starts)
            case "AT" if str(argument) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                return starts & {0}
            case "AT" if str(argument) in ("AT_END", "AT_END_STRING"):
                return starts & {len(name)}
            case "ASSERT" if argument[0] > 0:
                return {at for at in starts if self._ends(argument[1], name, {at})}
            case "ASSERT_NOT" if argument[0] > 0:
                return {at for at in starts if not self._ends(argument[1], name, {at})}
        raise self._unsupported(operation)

    def _repeated(self, argument: Any, name: str, starts: set[int]) -> set[int]:
        least, most, repeated = argument
        # after as many times as a name has characters, only empty matches can follow, which change nothing
        for _ in range(min(int(least), len(name) + 1)):
            starts = self._ends(repeated, name, starts)
        reached, added = set(starts), starts
        for _ in range(min(int(most) - int(least), len(name) + 1)):
            added = self._ends(repeated, name, added) - reached
            if not added:
                break
            reached |= added
        return reached

    def _is_one(self, operation: str, argument: Any, character: str) -> bool:
        """Return whether a part of the expression for one character matches this one."""
        match operation:
            case "ANY":
                return character != "\n"
            case "LITERAL":
                return ord(character) == int(argument)
            case "NOT_LITERAL":
                return ord(character) != int(argument)
            case "RANGE":
                return bool(argument[0] <= ord(character) <= argument[1])
            case "IN":
                is_negated = str(argument[0][0]) == "NEGATE"
                parts = argument[1:] if is_negated else argument
                return any(self._is_one(str(part), its, character) for part, its in parts) is not is_negated
            case "CATEGORY":
                name = str(argument)
                is_in = _CATEGORIES.get(name.replace("_NOT_", "_"))
                if is_in is not None:
                    return is_in(character) is not ("_NOT_" in name)
        raise self._unsupported(operation)

    def _unsupported(self, operation: str) -> ValueError:
        return ValueError(f"{self._said} has {operation.lower()}, which is not supported")
