"""Read calls whose arguments are JSON with other quotes and bare keys, as Gemma writes them, and send them as JSON.

`{city:<|"|>Paris<|"|>,days:3}` becomes `{"city":"Paris","days":3}`. What must always hold: strings stream, keys and
bare words are held back until they are complete, and a closing delimiter inside a string is part of it.
"""

from __future__ import annotations

from ...messages.output import ArgumentsDelta, CallEnd, OutputEvent
from .call_reader import CallReader, Progress
from .delimiter_scanner import MAX_HELD, DelimiterScanner, Hold
from .response_template import DialectFormat
from .typed_values import escaped


class DialectReader(CallReader):
    def __init__(self, opening: str, index: int, name: str | None, dialect: DialectFormat) -> None:
        super().__init__(opening, index, name)
        self._dialect = dialect
        self._scanner = DelimiterScanner(dialect.quotes, Hold.NOTHING)
        self._in_quotes = False
        self._in_plain = False
        self._is_escape = False
        self._word = ""
        """A bare word that may be a key."""
        self._after = ""
        """The last character outside strings that is not white space."""
        self._has_arguments = False

    @property
    def in_string(self) -> bool:
        return self._in_quotes or self._in_plain

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        if self.progress is Progress.OPENING:
            self._begin(events)
        rest = text
        while rest:
            scan = self._scanner.feed(rest)
            rest = scan.rest
            self._take(scan.text, events)
            if scan.found is not None:
                is_plain = self._in_plain
                text = self._flush() + ("" if is_plain else '"')
                self._send(escaped(scan.found.text) if is_plain else text, scan.found.text, events)
                self._in_quotes ^= not is_plain
                self._after = '"'
        return len(text)

    def close(self, source: str, events: list[OutputEvent]) -> None:
        self.cut(events)
        if not self._has_arguments:
            self._send("{}", "", events)
        events.append(CallEnd(self._index, source))
        self.progress = Progress.ENDED

    def cut(self, events: list[OutputEvent]) -> None:
        self._take(self._scanner.take(), events)
        self._send(self._flush(), "", events)

    def _take(self, text: str, events: list[OutputEvent]) -> None:
        self._send(escaped(text) if self._in_quotes else "".join(map(self._plain, text)), text, events)

    def _plain(self, char: str) -> str:
        """Return what a character outside the dialect's own strings makes certain."""
        if self._in_plain:
            self._in_plain = self._is_escape or char != '"'
            self._is_escape = char == "\\" and not self._is_escape
            return char
        if (char.isalnum() or char == "_") and len(self._word) < MAX_HELD and (self._word or self._after in ("{", ",")):
            self._word += char
            return ""
        if char == ":" and self._word and self._dialect.has_bare_keys:
            word, self._word = f'"{escaped(self._word)}"', ""
        else:
            word = self._flush()
        self._in_plain = char == '"'
        if not char.isspace():
            self._after = char
        return word + char

    def _flush(self) -> str:
        word, self._word = self._word, ""
        return word

    def _send(self, text: str, source: str, events: list[OutputEvent]) -> None:
        self._has_arguments |= bool(text.strip())
        if text or source:
            events.append(ArgumentsDelta(self._index, text, source))
