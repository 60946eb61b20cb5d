"""One sequence's output as events: text, reasoning and calls.

The detokenizer pushes each completion token with the text that it released. What must always hold: the sources of all
events, joined, are all pieces, joined; the same output gives the same events however it is cut into pieces; text is
held back only while it may be part of a delimiter, or of a call's opening.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...messages.output import ArgumentTypes, Markup, OutputEvent, ReasoningDelta, TextDelta
from .call_reader import CallReader, Progress
from .delimiter_programs import DelimiterPrograms, Meaning
from .delimiter_scanner import DelimiterScanner, Found, Hold, Scan
from .dialect_calls import DialectReader
from .json_calls import JsonArgumentsReader, JsonObjectReader
from .output_regions import SEPARATORS, Region, Skip
from .reasoning import ReasoningCount, read_prompt
from .response_template import CallStyle, ResponseTemplate
from .special_tokens import is_special
from .tagged_calls import TaggedReader


class ResponseParser:
    def __init__(
        self,
        template: ResponseTemplate,
        tool_types: Mapping[str, ArgumentTypes],
        prompt_tail: Sequence[tuple[int, str]],
    ) -> None:
        """`tool_types`: the tools that may be called. `prompt_tail`: the prompt's last tokens, and the text of each."""
        self._template = template
        self._tool_types = tool_types
        self._default_programs = template.tool_programs if tool_types else template.text_programs
        self._events: list[OutputEvent] = []
        self._count = ReasoningCount()
        self._has_special = False
        self._is_plain = False
        """Text without a delimiter's first character is content, at once."""
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._number = 0
        """The format of the current call, or of the last one."""
        self._doubtful: Found | None = None
        """A closing delimiter inside a string: it counts if the string turns out to be unfinished."""
        self._bare = template.bare_number if tool_types else None
        """The format in which a call may begin here without a delimiter."""
        self._is_after_call = False
        """The last call is complete, but its closing delimiter is still to come."""
        self._skip = Skip.NOTHING if self._bare is None else Skip.SPACE
        self._begin_text()
        prompt_end = read_prompt(template, prompt_tail)
        if prompt_end.is_open:
            self._begin_reasoning()
            self._count.open_before()
            self._skip = Skip.NOTHING
        if prompt_end.is_at_delimiter and self._strips:
            self._skip = Skip.SPACE

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens pushed so far are reasoning, delimiters included."""
        return self._count.num_tokens

    def push(self, token_id: int, piece: str) -> Sequence[OutputEvent]:
        """Take one completion token and the text that it released. Return what is certain now.

        A token whose text is not shown, such as a stop token, comes with an empty piece.
        """
        self._count.tokens += 1
        stand = self._template.specials.by_id.get(token_id)
        if stand is None:
            if not piece:
                return ()
            if self._is_plain:
                if not self._trigger(piece) and not (self._strips and piece[-1].isspace()):
                    return (ReasoningDelta(piece) if self._region is Region.REASONING else TextDelta(piece),)
                self._has_special = False
        else:
            piece = stand.replace(piece)
            self._has_special = True
        return self._take(piece)

    def finish(self, piece: str = "") -> Sequence[OutputEvent]:
        """Take the decoder's last piece, and return everything that was held back."""
        events = list(self._take(piece)) if piece else []
        self._end()
        return [*events, *self._released()]

    def _take(self, piece: str) -> Sequence[OutputEvent]:
        self._count.extend(len(piece))
        self._run(piece)
        if not self._scanner.held:
            self._count.forget()
            is_content = self._skip is Skip.NOTHING and not self._is_after_call
            self._is_plain = is_content and self._region is not Region.CALL
        else:
            self._is_plain = False
        return self._released()

    def _released(self) -> Sequence[OutputEvent]:
        events, self._events = self._events, []
        return [self._template.specials.shown(event) for event in events] if self._has_special else events

    def _run(self, rest: str) -> None:
        while rest:
            if self._region is Region.CALL:
                rest = self._run_call(rest)
            elif self._skip is not Skip.NOTHING:
                rest = self._run_skip(rest)
            else:
                rest = self._take_scan(self._scanner.feed(rest))

    def _run_skip(self, rest: str) -> str:
        content = rest.lstrip() if self._skip is Skip.SPACE else rest.lstrip(SEPARATORS)
        self._say_markup(rest[: len(rest) - len(content)])
        if content:
            self._skip = Skip.NOTHING
            if self._bare is not None and content[0] in "{[" and self._region is Region.TEXT:
                self._begin_call(self._bare, "", None, is_bare=True)
            self._bare = None
        return content

    def _take_scan(self, scan: Scan) -> str:
        self._say(scan.text)
        if scan.found is not None:
            self._take_delimiter(scan.found, len(scan.rest))
        return scan.rest

    def _take_delimiter(self, found: Found, num_after: int) -> None:
        delimiter = found.delimiter
        match delimiter.meaning:
            case Meaning.CALL_OPEN:
                self._begin_call(delimiter.number, found.space + found.text, found.capture, is_bare=False)
                return
            case Meaning.REASONING_OPEN:
                self._count.open(num_after + len(found.text))
                self._begin_reasoning()
            case Meaning.REASONING_CLOSE:
                self._count.close(num_after + 1)
                self._begin_text()
                if self._tool_types:
                    self._bare = self._template.bare_number
            case _:
                self._begin_text()
        self._say_markup(found.space + found.text)
        self._skip = Skip.SPACE if self._strips or self._bare is not None else Skip.NOTHING

    def _begin_text(self) -> None:
        self._region, self._reader, self._is_after_call = Region.TEXT, None, False
        self._strips = self._template.strips
        self._use(self._default_programs)

    def _begin_reasoning(self) -> None:
        reasoning = self._template.reasoning
        self._region = Region.REASONING
        self._strips = reasoning is not None and reasoning.strips
        self._use(self._template.reasoning_programs)

    def _begin_call(self, number: int, opening: str, capture: str | None, *, is_bare: bool) -> None:
        if capture is not None and capture not in self._tool_types:
            self._say(opening)
            return
        self._region, self._number = Region.CALL, number
        self._reader = self._make_reader(opening, capture, is_bare=is_bare)
        self._use(self._template.close_programs[number])
        self._read(self._reader, "", "")

    def _make_reader(self, opening: str, name: str | None, *, is_bare: bool) -> CallReader:
        call, index = self._template.calls[self._number], self._num_calls
        has_close = call.close is not None
        if call.tags is not None:
            return TaggedReader(opening, index, name, call.tags, self._tool_types.get(name or "", {}))
        if call.dialect is not None:
            return DialectReader(opening, index, name, call.dialect)
        if call.style is CallStyle.OBJECT:
            return JsonObjectReader(opening, index, self._tool_types, has_close=has_close, is_bare=is_bare)
        return JsonArgumentsReader(opening, index, name, has_close=has_close)

    def _use(self, programs: DelimiterPrograms) -> None:
        holds_space = self._strips and self._region is not Region.CALL
        self._scanner = DelimiterScanner(programs, Hold.SPACE if holds_space else Hold.NOTHING)
        self._trigger = programs.trigger.search

    def _run_call(self, rest: str) -> str:
        """Take `rest` up to the end of the call at most. Return what follows."""
        reader = self._reader
        assert reader is not None
        if self._doubtful is not None:
            doubtful, self._doubtful = self._doubtful, None
            if rest[0] < " ":
                self._close(reader, doubtful.text)
                return rest
            if (after := self._read(reader, doubtful.text, rest)) is not None:
                return after
        scan = self._scanner.feed(rest)
        found = scan.found
        following = self._scanner.held if found is None else found.space + found.text + scan.rest
        if (after := self._read(reader, scan.text, following)) is not None:
            return after
        if found is None:
            return ""
        if reader.in_string and not is_special(found.text):
            self._doubtful = found
        else:
            self._close(reader, found.text)
        return scan.rest

    def _read(self, reader: CallReader, text: str, following: str) -> str | None:
        """Have the reader read `text`. Return what follows the call, if it ends there."""
        was_open = reader.progress is Progress.OPENING
        consumed = reader.feed(text, self._events)
        if was_open and reader.progress in (Progress.BEGUN, Progress.ENDED):
            self._num_calls += 1
        if reader.progress is Progress.REJECTED:
            self._reject(reader)
        elif reader.progress is Progress.ENDED:
            self._end_call(is_closed=False)
        else:
            return None
        return text[consumed:] + following

    def _close(self, reader: CallReader, source: str) -> None:
        was_open = reader.progress is Progress.OPENING
        reader.close(source, self._events)
        if reader.progress is Progress.REJECTED:
            self._reject(reader)
            self._say(source)
            return
        self._num_calls += was_open
        self._end_call(is_closed=True)

    def _reject(self, reader: CallReader) -> None:
        """Release the opening of what turned out not to be a call as text."""
        self._begin_text()
        self._say(reader.opening)

    def _end_call(self, *, is_closed: bool) -> None:
        self._begin_text()
        self._skip = Skip.SPACE if self._strips else Skip.NOTHING
        if not is_closed:
            self._is_after_call = True
            self._use(self._template.programs_after_call[self._number])
            if self._template.calls[self._number].style is CallStyle.OBJECT:
                self._bare, self._skip = self._number, Skip.SEPARATORS

    def _end(self) -> None:
        """Take everything that is held back. Each turn takes at least one character or delimiter."""
        rest = ""
        while rest or self._scanner.held or self._doubtful is not None:
            reader, doubtful = self._reader, self._doubtful
            if rest:
                self._run(rest)
                rest = ""
            elif reader is None:
                scan = self._scanner.finish()
                if self._is_after_call and scan.found is None:
                    self._say_markup(scan.text)
                else:
                    rest = self._take_scan(scan)
            elif doubtful is not None:
                self._doubtful = None
                self._close(reader, doubtful.text)
            else:
                scan = self._scanner.finish()
                found = scan.found
                following = scan.rest if found is None else found.space + found.text + scan.rest
                after = self._read(reader, scan.text, following)
                if after is None and found is not None:
                    self._close(reader, found.text)
                rest = scan.rest if after is None else after
        if self._reader is not None:
            if self._reader.progress is Progress.OPENING:
                self._reject(self._reader)
            else:
                self._reader.cut(self._events)

    def _say(self, text: str) -> None:
        if text:
            self._is_after_call = False
            self._events.append(ReasoningDelta(text) if self._region is Region.REASONING else TextDelta(text))

    def _say_markup(self, text: str) -> None:
        if text:
            self._events.append(Markup(text))
