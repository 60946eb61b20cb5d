"""What the parser knows of a model's output: its delimiters and how its calls are written.

Built once, at start, from `response_template` dictionaries (`template_building.py`). Read-only.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cached_property

import attrs

from .delimiter_programs import Delimiter, DelimiterPrograms
from .delimiter_scanner import Hold
from .output_patterns import without_leading_space
from .special_tokens import SpecialTokens


class CallStyle(Enum):
    OBJECT = auto()
    """`{"name": …, "arguments": …}`, or a list of these."""
    ARGUMENTS = auto()
    """A name in the opening delimiter, then the arguments."""


@attrs.frozen
class TagFormat:
    """How arguments are written one after the other."""

    open: DelimiterPrograms
    """Its capture is the argument's name."""
    close: DelimiterPrograms
    hold: Hold
    """What in front of an argument's end is no part of it."""
    is_json: bool
    """A value that is JSON is no string."""


@attrs.frozen
class DialectFormat:
    """How arguments deviate from JSON."""

    quotes: DelimiterPrograms
    has_bare_keys: bool


@attrs.frozen
class CallFormat:
    """One way in which calls are written."""

    style: CallStyle
    open: Delimiter
    close: Delimiter | None
    """None: a call ends with its JSON."""
    tags: TagFormat | None = None
    dialect: DialectFormat | None = None
    """With neither, the arguments are JSON."""
    is_bare: bool = False
    """A call may also begin without any delimiter, at the start of the output."""

    @property
    def is_list(self) -> bool:
        """Whether another call may follow without another delimiter."""
        return self.style is CallStyle.OBJECT


@attrs.frozen
class ReasoningFormat:
    open: Delimiter
    close: Delimiter
    tags: tuple[str, str] | None
    """The texts of both, if each has one."""
    strips: bool = True
    """White space around reasoning is no content."""


@attrs.frozen(slots=False, eq=False)
class ResponseTemplate:
    reasoning: ReasoningFormat | None
    calls: tuple[CallFormat, ...]
    text_close: Delimiter | None
    strips: bool
    """White space around the answer's text, next to delimiters, is no content."""
    specials: SpecialTokens
    """Delimiters that are special tokens."""
    special_ids: frozenset[int]
    """All special tokens of the vocabulary."""

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """What opens and what closes reasoning. None: nothing does, or not in one way."""
        return None if self.reasoning is None else self.reasoning.tags

    def compile(self) -> None:
        """Build all automata now. Raises UnsupportedPattern."""
        for programs in (self.text_programs, self.tool_programs, self.reasoning_programs, self.prompt_programs):
            assert programs
        assert self.programs_after_call is not None
        assert self.close_programs is not None

    @cached_property
    def text_programs(self) -> DelimiterPrograms:
        """What is looked for in the answer of a request without tools."""
        return DelimiterPrograms(self._text_delimiters())

    @cached_property
    def tool_programs(self) -> DelimiterPrograms:
        return DelimiterPrograms([*self._text_delimiters(), *(call.open for call in self.calls)])

    @cached_property
    def programs_after_call(self) -> list[DelimiterPrograms]:
        """By call format: its closing delimiter is still to come when the call's JSON is complete."""
        opens = [*self._text_delimiters(), *(call.open for call in self.calls)]
        closes = [
            call.close and attrs.evolve(call.close, pattern=without_leading_space(call.close.pattern))
            for call in self.calls
        ]
        return [self.tool_programs if close is None else DelimiterPrograms([*opens, close]) for close in closes]

    @cached_property
    def close_programs(self) -> list[DelimiterPrograms]:
        return [DelimiterPrograms([] if call.close is None else [call.close]) for call in self.calls]

    @cached_property
    def reasoning_programs(self) -> DelimiterPrograms:
        return DelimiterPrograms([] if self.reasoning is None else [self.reasoning.close])

    @cached_property
    def prompt_programs(self) -> DelimiterPrograms:
        """What tells whether a prompt has opened reasoning."""
        return DelimiterPrograms([] if self.reasoning is None else [self.reasoning.open, self.reasoning.close])

    @cached_property
    def bare_number(self) -> int | None:
        return next((number for number, call in enumerate(self.calls) if call.is_bare), None)

    def _text_delimiters(self) -> list[Delimiter]:
        found = [] if self.reasoning is None else [self.reasoning.open]
        return found if self.text_close is None else [*found, self.text_close]
