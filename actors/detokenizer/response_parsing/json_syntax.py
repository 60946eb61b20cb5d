"""Follow JSON character by character, also where it turns out not to be JSON.

Used by the readers of calls. What must always hold: `depth` and `in_string` are exact for well-formed JSON; after an
error (`is_broken`) brackets and double quotes are followed as far as possible.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import attrs

MAX_DEPTH = 500

STRING_END = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
"""Characters that end a string, escape in it, or are not allowed in it."""


class Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    SCALAR = auto()
    STRING = auto()
    ESCAPE = auto()


_SCALAR = frozenset("0123456789+-.eEtruefalsn")
_ESCAPED = frozenset('"\\/bfnrtu')


@attrs.define(eq=False)
class JsonSyntax:
    """The state of one value, which begins where VALUE is expected and is complete at depth 0 after it."""

    _brackets: list[str] = attrs.field(factory=list)
    _is_key: bool = False
    expect: Expect = Expect.VALUE
    is_broken: bool = False

    @property
    def depth(self) -> int:
        return len(self._brackets)

    @property
    def in_string(self) -> bool:
        return self.expect is Expect.STRING or self.expect is Expect.ESCAPE

    @property
    def in_key(self) -> bool:
        return self._is_key and self.in_string

    @property
    def is_complete(self) -> bool:
        return not self._brackets and self.expect is Expect.COMMA_OR_END

    def step(self, char: str) -> None:
        expect = self.expect
        if expect is Expect.STRING:
            if char == '"':
                self.expect = Expect.COLON if self._is_key else Expect.COMMA_OR_END
            elif char == "\\":
                self.expect = Expect.ESCAPE
            elif char < " " or "\ud800" <= char <= "\udfff":
                self.is_broken = True
        elif expect is Expect.ESCAPE:
            self.expect = Expect.STRING
            self.is_broken |= char not in _ESCAPED
        elif char in " \t\n\r":
            if expect is Expect.SCALAR:
                self.expect = Expect.COMMA_OR_END
        elif char == '"':
            self._is_key = expect is Expect.KEY or expect is Expect.KEY_OR_END
            self.is_broken |= not (self._is_key or expect is Expect.VALUE or expect is Expect.VALUE_OR_END)
            self.expect = Expect.STRING
        elif char in "{[":
            self.is_broken |= not (expect is Expect.VALUE or expect is Expect.VALUE_OR_END) or self.depth >= MAX_DEPTH
            if self.depth < MAX_DEPTH:
                self._brackets.append(char)
            self.expect = Expect.KEY_OR_END if char == "{" else Expect.VALUE_OR_END
        elif char in "}]":
            ends = Expect.KEY_OR_END if char == "}" else Expect.VALUE_OR_END
            opening = self._brackets.pop() if self._brackets else ""
            is_right = expect is ends or expect is Expect.COMMA_OR_END or expect is Expect.SCALAR
            self.is_broken |= not is_right or opening + char not in ("{}", "[]")
            self.expect = Expect.COMMA_OR_END
        elif char == ":":
            self.is_broken |= expect is not Expect.COLON
            self.expect = Expect.VALUE
        elif char == ",":
            self.is_broken |= expect not in (Expect.COMMA_OR_END, Expect.SCALAR) or not self._brackets
            self.expect = Expect.KEY if self._brackets and self._brackets[-1] == "{" else Expect.VALUE
        else:
            begins = expect is Expect.VALUE or expect is Expect.VALUE_OR_END or expect is Expect.SCALAR
            self.is_broken |= not begins or char not in _SCALAR
            self.expect = Expect.SCALAR
