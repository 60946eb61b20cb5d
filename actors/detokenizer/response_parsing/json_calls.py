"""Read calls whose arguments are JSON: `{"name": …, "arguments": …}`, or a name followed by the arguments alone.

What must always hold: a call's argument texts, joined, are exactly the model's characters of the arguments; a
well-formed call ends with its JSON, a malformed one at the closing delimiter.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Container

from ...messages.output import ArgumentsDelta, CallEnd, Markup, OutputEvent
from .call_reader import CallReader, Progress
from .delimiter_scanner import MAX_HELD
from .json_syntax import STRING_END, Expect, JsonSyntax

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "type", "id", "function", *ARGUMENT_KEYS})
"""First keys of objects that are read as a call without a delimiter."""
_SPACE = " \t\n\r"


class JsonReader(CallReader):
    """Base of both forms: reads the arguments as runs of characters, and the end."""

    def __init__(self, opening: str, index: int, name: str | None, *, has_close: bool) -> None:
        super().__init__(opening, index, name)
        self._has_close = has_close
        self._syntax = JsonSyntax()
        self._has_arguments = False
        self._in_arguments = False

    @property
    def in_string(self) -> bool:
        return self._syntax.in_string and not self._syntax.is_broken

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        at, end = 0, len(text)
        while at < end and self.progress is Progress.OPENING:
            if not self._open(text[at], events):
                self.progress = Progress.REJECTED
                return at
            at += 1
        start, kind = at, True
        while at < end:
            if self._in_arguments and self._syntax.expect is Expect.STRING:
                special = STRING_END.search(text, at)
                stop = end if special is None else special.start()
                is_argument = True
            else:
                stop = at
            if stop == at:
                is_argument = self._step(text[at])
                stop = at + 1
            if is_argument is not kind:
                self._emit(text[start:at], kind, events)
                start, kind = at, is_argument
            at = stop
            if self._syntax.is_complete and not (self._syntax.is_broken and self._has_close):
                self._emit(text[start:at], kind, events)
                self._end("", events)
                return at
        self._emit(text[start:at], kind, events)
        return at

    def close(self, source: str, events: list[OutputEvent]) -> None:
        if self.progress is Progress.OPENING:
            self.progress = Progress.REJECTED
        else:
            self._end(source, events)

    def cut(self, events: list[OutputEvent]) -> None:
        del events  # nothing is held back

    def _end(self, source: str, events: list[OutputEvent]) -> None:
        if not self._has_arguments:
            events.append(ArgumentsDelta(self._index, "{}"))
        events.append(CallEnd(self._index, source))
        self.progress = Progress.ENDED

    def _emit(self, text: str, is_argument: bool, events: list[OutputEvent]) -> None:
        if text:
            events.append(ArgumentsDelta(self._index, text, text) if is_argument else Markup(text))

    @abstractmethod
    def _open(self, char: str, events: list[OutputEvent]) -> bool:
        """Take one character of the opening. Return False, and leave it, if this is not a call."""

    @abstractmethod
    def _step(self, char: str) -> bool:
        """Consume one character. Return whether it belongs to the arguments."""


class JsonObjectReader(JsonReader):
    """Read `{"name": "…", "arguments": …}`: keys in any order, further keys, or a list of such objects' first one."""

    def __init__(self, opening: str, index: int, tools: Container[str], *, has_close: bool, is_bare: bool) -> None:
        """`is_bare`: no delimiter has announced a call, so that the object's first key decides."""
        super().__init__(opening, index, None, has_close=has_close)
        self._tools = tools
        self._is_bare = is_bare
        self._key = ""
        self._string: list[str] | None = None
        """The characters of the key or name that is being read."""
        self._early: list[str] = []
        """Arguments that came before the name."""

    def _open(self, char: str, events: list[OutputEvent]) -> bool:
        syntax = self._syntax
        if not syntax.depth:
            is_list = char == "[" and not self.opening.endswith("[")
            if not (char in _SPACE or is_list or char == "{"):
                return False
        if len(self.opening) >= MAX_HELD:
            return False
        if char == "{" or syntax.depth:
            if self._step(char):
                self._early.append(char)
            is_named = self._name is not None and self._name in self._tools
            if not is_named and (syntax.is_broken or self._name is not None or syntax.is_complete):
                return False
        self.opening += char
        if self._name is not None:
            self._begin(events)
            if self._early:
                events.append(ArgumentsDelta(self._index, "".join(self._early)))
        return True

    def _step(self, char: str) -> bool:
        syntax = self._syntax
        expect, depth, was_key = syntax.expect, syntax.depth, syntax.in_key
        syntax.step(char)
        if self._in_arguments:
            return self._continues(expect, depth)
        if depth != 1:
            return False
        if expect is Expect.VALUE and char not in _SPACE:
            if self._key in ARGUMENT_KEYS and not self._has_arguments:
                self._in_arguments = True
                if self._continues(expect, depth):
                    self._has_arguments = True
                    return True
                return False
            if self._key == "name" and self.progress is Progress.OPENING:
                self._string = []
                if char != '"':
                    syntax.is_broken = True
        elif char == '"' and syntax.in_key and not was_key:
            self._string = []
        elif self._string is not None:
            if syntax.in_string:
                if len(self._string) < MAX_HELD:
                    self._string.append(char)
            else:
                self._take_string(was_key)
        return False

    def _take_string(self, is_key: bool) -> None:
        try:
            text = json.loads(f'"{"".join(self._string or ())}"')
        except ValueError:
            text = ""
        self._string = None
        if is_key:
            self._key = text
            if self._is_bare and self.progress is Progress.OPENING and text not in CALL_KEYS:
                self._syntax.is_broken = True
        elif self.progress is Progress.OPENING:
            self._name = text

    def _continues(self, expect: Expect, depth: int) -> bool:
        syntax = self._syntax
        if syntax.depth > 1:
            return True
        ends_inside = depth > 1 or expect is Expect.STRING
        if syntax.depth == 1 and (syntax.in_string or syntax.expect is Expect.SCALAR):
            return True
        self._in_arguments = False
        return syntax.depth == 1 and ends_inside


class JsonArgumentsReader(JsonReader):
    """Read the arguments alone: the opening delimiter holds the name."""

    def _open(self, char: str, events: list[OutputEvent]) -> bool:
        if char == "{":
            self._begin(events)
            self._step(char)
            self._emit(char, True, events)
            return True
        if char not in _SPACE or len(self.opening) >= MAX_HELD:
            return False
        self.opening += char
        return True

    def _step(self, char: str) -> bool:
        self._in_arguments = self._has_arguments = True
        self._syntax.step(char)
        return True

    def close(self, source: str, events: list[OutputEvent]) -> None:
        if self.progress is Progress.OPENING:
            self._begin(events)
        super().close(source, events)
