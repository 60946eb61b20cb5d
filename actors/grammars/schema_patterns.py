"""Translates the patterns of JSON schemas from ECMA 262 to the grammar library's dialect.

The library reads a pattern as Rust's `regex` crate does. Where the dialects differ, the pattern is rewritten or
refused. What must always hold: every string that the result matches is matched by ECMA 262's pattern (with its flag
`u`, and for classes without it), and Python's `re` agrees about white space.
"""

from __future__ import annotations

import re

import attrs

from .grammar_library import is_known_class
from .pattern_groups import PatternGroups, UnsupportedPattern

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "(?:0[13-9]|1[0-2])-(?:0[1-9]|[12][0-9]|30)|(?:0[13578]|1[02])-31|02-(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{_YEAR}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
"""A date of the Gregorian calendar in the years 1 to 9999, as RFC 3339 writes it."""
_REAL_DATE = f"^(?:[0-9]*[1-9][0-9]*-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-)"
_NO_LEAP_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
FORMATS = {
    "date": _REAL_DATE,
    "date-time": f"{_REAL_DATE}[^:]*{_NO_LEAP_SECOND}",
    "time": f"^{_NO_LEAP_SECOND}",
}
"""Patterns for what the library's own formats do not check: leap days and leap seconds."""

UNWRITABLE = frozenset({*range(0x20), 0x7F} - {*b"\b\f\n\r\t"})
"""Characters that no output contains: JSON escapes them by number, which outputs never do."""
NO_CONTROLS = "outputs have no control characters other than \\b, \\f, \\n, \\r and \\t"
_SPACE = r"\t\n\v\f\r\x20\xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_MAYBE_SPACE = rf"{_SPACE}\x{{FEFF}}\x{{85}}"
"""White space of ECMA 262, or of Python."""
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_ASCII = {"d": "0-9", "D": "^0-9", "w": "0-9A-Za-z_", "W": "^0-9A-Za-z_"}
"""Classes that the library, outside JSON, extends to all of Unicode."""
_LETTERS = frozenset("nrtf")
"""Copied after a backslash."""
_CODES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0}
_ESCAPED_CODE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u([0-9a-fA-F]{4})|\\u\{([0-9a-fA-F]{1,6})\}|\\x([0-9a-fA-F]{2})"
)
_PROPERTY = re.compile(r"\\[pP](\{[^}]*\}|.)")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?:([0-9]+)(?:,([0-9]*))?|,[0-9]+)\})\??")
_GROUP = re.compile(r"\((\?(?::|i:|P?<[A-Za-z_]\w*>|))?", re.ASCII)
_MAX_PROPERTIES = 16
"""Of one pattern; the library takes a millisecond to tell whether it knows one."""
_MAX_DIGITS = 9
"""Of a number of repetitions."""


def library_pattern(pattern: str) -> str:
    """Return a pattern of ECMA 262 in the library's dialect. Raises UnsupportedPattern."""
    return PatternReader(pattern).read()


@attrs.define
class PatternReader:
    source: str
    at: int = 0
    groups: PatternGroups = attrs.field(factory=PatternGroups)
    _properties: set[str] = attrs.field(factory=set)

    def read(self) -> str:
        """Return the pattern in the library's dialect. Raises UnsupportedPattern."""
        parts = []
        while self.at < len(self.source):
            if found := _QUANTIFIER.match(self.source, self.at):
                self.at = found.end()
                if _QUANTIFIER.match(self.source, self.at):
                    raise UnsupportedPattern("a quantifier follows another")
                _check_range(found[0], found[1] or "0", found[2] or found[1] or "0")
                self.groups.quantifier()
                parts.append(found[0])
            else:
                parts.append(self._atom())
        self.groups.end()
        return "".join(parts)

    def _atom(self) -> str:
        char = self.source[self.at]
        if char == "(":
            return self._group()
        if char in ")|^$":
            self.at += 1
            self.groups.mark(char)
            return char
        self.groups.text()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        self.at += 1
        if char in "{}":
            return f"\\{char}"
        return _DOT if char == "." else _written(ord(char), char)

    def _group(self) -> str:
        found = _GROUP.match(self.source, self.at)
        assert found is not None
        if found[1] == "?":
            kind = self.source[found.end() : found.end() + 2]
            is_look = kind[:1] in ("=", "!") or kind in ("<=", "<!")
            raise UnsupportedPattern(
                "look-around, look-ahead and look-behind" if is_look else f"the group `(?{kind[:1]}`"
            )
        self.at = found.end()
        self.groups.open()
        return "(?i:" if found[1] == "?i:" else "(?:"

    def _escape(self) -> str:
        code = self._code()
        if code is not None:
            return _written(code, _char_text(code))
        letter = self._letter()
        if letter == "s":
            return f"[{_SPACE}]"
        if letter == "S":
            return f"[^{_MAYBE_SPACE}]"
        if letter in _ASCII:
            return f"[{_ASCII[letter]}]"
        if letter in ("p", "P"):
            return self._property()
        self._check_letter(letter)
        return letter if letter in "<>" else f"\\{letter}"

    def _class(self) -> str:
        """Read a class, and write each of its characters by its number."""
        self.at += 1
        is_negated = self.source.startswith("^", self.at)
        self.at += is_negated
        members: list[tuple[int, int] | str] = []
        while not self.source.startswith("]", self.at):
            low = self._member(is_negated)
            if isinstance(low, str) or self._peek() != "-" or self._peek(1) == "]":
                members.append(low if isinstance(low, str) else (low, low))
                continue
            self.at += 1
            high = self._member(is_negated)
            if isinstance(high, str):
                members += [(low, low), (ord("-"), ord("-")), high]
            elif low > high:
                raise UnsupportedPattern("a range of characters is out of order")
            else:
                members.append((low, high))
        self.at += 1
        if not members:
            if is_negated:
                return "(?s:.)"
            raise UnsupportedPattern("an empty class of characters")
        if not is_negated:
            members = [one for one in members if isinstance(one, str) or not _is_unwritable(*one)]
            if not members:
                raise UnsupportedPattern(NO_CONTROLS)
        return f"[{'^' if is_negated else ''}{''.join(map(_member_text, members))}]"

    def _member(self, is_negated: bool) -> int | str:
        """Read a character of a class, or a class within it."""
        char = self._peek()
        if char == "":
            raise UnsupportedPattern("an unclosed class of characters")
        if char != "\\":
            self.at += 1
            return ord(char)
        code = self._code()
        if code is not None:
            return code
        letter = self._letter()
        if letter in ("s", "S"):
            # the larger set where it is excluded, the smaller one where it is included
            is_wide = is_negated == (letter == "s")
            return f"[{'^' if letter == 'S' else ''}{_MAYBE_SPACE if is_wide else _SPACE}]"
        if letter in _ASCII:
            return f"[{_ASCII[letter]}]"
        if letter in ("p", "P"):
            return self._property()
        if letter == "b":
            return 0x08
        if letter.isalnum():
            raise UnsupportedPattern(f"the escape `\\{letter}` in a class of characters")
        return ord(letter)

    def _code(self) -> int | None:
        """Read an escape of one character; None if the next escape is another."""
        if found := _ESCAPED_CODE.match(self.source, self.at):
            self.at = found.end()
            if found[1]:
                return 0x10000 + ((int(found[1], 16) & 0x3FF) << 10) + (int(found[2], 16) & 0x3FF)
            number = int(found[3] or found[4] or found[5], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise UnsupportedPattern(f"the escape `{found[0]}` is no character")
            return number
        code = _CODES.get(self._peek(1))
        if code is None or (code == 0 and self._peek(2).isdigit()):
            return None
        self.at += 2
        return code

    def _letter(self) -> str:
        letter = self._peek(1)
        if letter == "":
            raise UnsupportedPattern("it ends with a backslash")
        self.at += 2
        return letter

    def _property(self) -> str:
        found = _PROPERTY.match(self.source, self.at - 2)
        if found is None:
            raise UnsupportedPattern("the escape `\\p` without a name")
        self.at = found.end()
        self._properties.add(found[0])
        if len(self._properties) > _MAX_PROPERTIES:
            raise UnsupportedPattern(f"more than {_MAX_PROPERTIES} properties of characters")
        if not is_known_class(found[0]):
            raise UnsupportedPattern(f"the escape `{found[0][:40]}`")
        return found[0]

    def _check_letter(self, letter: str) -> None:
        if letter in "bB":
            raise UnsupportedPattern("word boundaries")
        if letter == "k" or letter.isdecimal():
            raise UnsupportedPattern("backreferences")
        if letter.isascii() and letter.isalpha() and letter not in _LETTERS:
            raise UnsupportedPattern(f"the escape `\\{letter}` is none of ECMA 262's")

    def _peek(self, ahead: int = 0) -> str:
        return self.source[self.at + ahead : self.at + ahead + 1]


def _check_range(quantifier: str, least: str, most: str) -> None:
    if quantifier.startswith("{,"):
        raise UnsupportedPattern("`{,` is a quantifier in some dialects and text in others")
    if max(len(least), len(most)) > _MAX_DIGITS or int(least) > int(most):
        raise UnsupportedPattern("a quantifier is out of range")


def _is_unwritable(low: int, high: int) -> bool:
    return high < 0x80 and UNWRITABLE.issuperset(range(low, high + 1))


def _member_text(member: tuple[int, int] | str) -> str:
    if isinstance(member, str):
        return member
    low, high = map(_char_text, member)
    return low if low == high else f"{low}-{high}"


def _char_text(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _written(code: int, text: str) -> str:
    if code in UNWRITABLE:
        raise UnsupportedPattern(NO_CONTROLS)
    return text
