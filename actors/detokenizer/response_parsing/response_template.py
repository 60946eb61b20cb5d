"""What the parser knows of a model's output: its delimiters and how its calls are written.

Built once, at start (`template_building.py`). Read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import attrs

from .delimiter_programs import Delimiter, DelimiterPrograms
from .delimiter_scanner import Hold
from .output_patterns import without_leading_space
from .special_tokens import SpecialTokens


class CallStyle(Enum):
    OBJECT = auto()
    """`{"name": …, "arguments": …}`, or a list of these, which has no delimiters between its calls."""
    ARGUMENTS = auto()
    """A name in the opening delimiter, then the arguments."""


@attrs.frozen
class TagFormat:
    """How arguments are written one after the other."""

    open: DelimiterPrograms
    """Its capture is the argument's name."""
    close: DelimiterPrograms
    hold: Hold
    """White space before an argument's end that is not part of it."""
    is_json: bool
    """A value that is valid JSON is not a string."""


@attrs.frozen
class DialectFormat:
    """How arguments deviate from JSON."""

    quotes: DelimiterPrograms
    has_bare_keys: bool


@attrs.frozen
class CallFormat:
    style: CallStyle
    open: Delimiter
    close: Delimiter | None
    """None: a call ends with its JSON."""
    tags: TagFormat | None = None
    dialect: DialectFormat | None = None
    """With neither, the arguments are JSON."""
    is_bare: bool = False
    """A call may also begin without any delimiter, at the start of the output."""


@attrs.frozen
class ReasoningFormat:
    open: Delimiter
    close: Delimiter
    tags: tuple[str, str] | None
    """The texts of both, if each has one."""
    strips: bool = True
    """White space around reasoning is not part of it."""


class ResponseTemplate:
    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None,
        calls: Sequence[CallFormat],
        text_close: Delimiter | None,
        strips: bool,
        specials: SpecialTokens,
        special_ids: Iterable[int],
    ) -> None:
        """Build all automata.

        `text_close` ends a turn. `strips`: white space around the answer's text, next to delimiters, is dropped.
        `specials` are the delimiters that are special tokens, `special_ids` all special tokens of the vocabulary.
        Raises UnsupportedPattern.
        """
        self.reasoning = reasoning
        self.calls = tuple(calls)
        self.strips = strips
        self.specials = specials
        self.special_ids = frozenset(special_ids)
        self.bare_number = next((number for number, call in enumerate(self.calls) if call.is_bare), None)
        """The format in which a call may begin without a delimiter."""

        in_text = [one for one in (None if reasoning is None else reasoning.open, text_close) if one is not None]
        in_answer = [*in_text, *(call.open for call in self.calls)]
        self.text_programs = DelimiterPrograms(in_text)
        self.tool_programs = DelimiterPrograms(in_answer)
        self.programs_after_call = [
            self.tool_programs if call.close is None else DelimiterPrograms([*in_answer, _late(call.close)])
            for call in self.calls
        ]
        """By call format: its closing delimiter is still to come when the call's JSON is complete."""
        self.close_programs = [DelimiterPrograms([] if call.close is None else [call.close]) for call in self.calls]
        self.reasoning_programs = DelimiterPrograms([] if reasoning is None else [reasoning.close])
        self.prompt_programs = DelimiterPrograms([] if reasoning is None else [reasoning.open, reasoning.close])
        """The delimiters that tell whether a prompt has opened reasoning."""

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The texts that open and close reasoning; None if there are none, or several."""
        return None if self.reasoning is None else self.reasoning.tags


def _late(close: Delimiter) -> Delimiter:
    """Return a closing delimiter without its leading white space, which is skipped anyway."""
    return attrs.evolve(close, pattern=without_leading_space(close.pattern))
