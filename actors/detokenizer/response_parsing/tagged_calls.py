"""Read calls that write one argument after the other, as XML-like tags or as lines.

Arguments are sent as one JSON object: a string as it comes, a value of another type when it is complete. What must
always hold: the joined texts of a call that has ended are valid JSON.
"""

from __future__ import annotations

import attrs

from ...messages.output import ArgumentsDelta, ArgumentTypes, CallEnd, Markup, OutputEvent
from .call_reader import CallReader, Progress
from .delimiter_scanner import DelimiterScanner, Hold
from .response_template import TagFormat
from .typed_values import JSON, STRING, escaped, may_be_typed, typed_json


class TaggedReader(CallReader):
    """Read `<parameter=key>value</parameter>…` and its like."""

    def __init__(self, opening: str, index: int, name: str | None, tags: TagFormat, types: ArgumentTypes) -> None:
        super().__init__(opening, index, name)
        self._tags = tags
        self._types = types
        self._scanner = DelimiterScanner(tags.open, Hold.NOTHING)
        self._num_arguments = 0
        self._value: _Value | None = None

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        if self.progress is Progress.OPENING:
            self._begin(events)
        rest = text
        while rest:
            scan = self._scanner.feed(rest)
            rest = scan.rest
            found = scan.found
            if self._value is None:
                if scan.text:
                    events.append(Markup(scan.text))
                if found is not None:
                    self._begin_value((found.capture or "").strip(), found.space + found.text, events)
            else:
                self._send(self._value.add(scan.text), scan.text, events)
                if found is not None:
                    self._end_value(self._value, found.space + found.text, events)
        return len(text)

    def close(self, source: str, events: list[OutputEvent]) -> None:
        self._end_text(events, is_closed=True)
        self._send("{}" if not self._num_arguments else "}", "", events)
        events.append(CallEnd(self._index, source))
        self.progress = Progress.ENDED

    def cut(self, events: list[OutputEvent]) -> None:
        self._end_text(events, is_closed=False)

    def _end_text(self, events: list[OutputEvent], *, is_closed: bool) -> None:
        """Take what is held back as the rest of the argument, or as text between arguments."""
        held = self._scanner.take()
        value = self._value
        if value is None:
            if held:
                events.append(Markup(held))
        elif is_closed:
            content = held.rstrip() if self._tags.hold is Hold.SPACE else held.removesuffix("\n")
            self._send(value.add(content), held, events)
            self._end_value(value, "", events)
        else:
            self._send(value.add(held), held, events)
            self._send(value.cut(), "", events)

    def _begin_value(self, key: str, source: str, events: list[OutputEvent]) -> None:
        types = self._types.get(key, ()) or (STRING,)
        if self._tags.is_json:
            types = (JSON, *types)
        self._send(f'{", " if self._num_arguments else "{"}"{escaped(key)}": ', source, events)
        self._num_arguments += 1
        self._value = _Value(types)
        self._scanner = DelimiterScanner(self._tags.close, self._tags.hold)

    def _end_value(self, value: _Value, source: str, events: list[OutputEvent]) -> None:
        self._send(value.end(), source, events)
        self._value = None
        self._scanner = DelimiterScanner(self._tags.open, Hold.NOTHING)

    def _send(self, text: str, source: str, events: list[OutputEvent]) -> None:
        if text or source:
            events.append(ArgumentsDelta(self._index, text, source))


@attrs.define(eq=False)
class _Value:
    """One argument: held back until its type is known."""

    _types: tuple[str, ...]
    _held: str = ""
    _is_string: bool = False

    def add(self, text: str) -> str:
        """Return what is certain of the value's JSON."""
        if self._is_string:
            return escaped(text)
        self._held += text
        return "" if may_be_typed(self._held, self._types) else self._begin_string()

    def end(self) -> str:
        """Return the rest of the value's JSON."""
        if self._is_string:
            return '"'
        typed = typed_json(self._held, self._types)
        return self._begin_string() + '"' if typed is None else typed

    def cut(self) -> str:
        """Return what is held back of a value that is incomplete."""
        if self._is_string or not self._held:
            return ""
        typed = typed_json(self._held, self._types)
        return self._begin_string() if typed is None else typed

    def _begin_string(self) -> str:
        self._is_string = True
        held, self._held = self._held, ""
        return f'"{escaped(held)}'
