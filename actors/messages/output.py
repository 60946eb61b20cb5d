"""What a model's output means: text, reasoning and tool calls, as typed events.

The detokenizer's response parser makes the events from a sequence's tokens, request handlers receive them in a `Delta`
(`handler.py`) and render them in their API. What must always hold: the sources of a sequence's events, joined, are its
output, character for character.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from .call_syntax import CallForm

ArgumentTypes = Mapping[str, tuple[str, ...]]
"""The JSON types that a tool's schema allows for each of its arguments, by name. Empty: any."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str

    @property
    def source(self) -> str:
        return self.text


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thought before its answer."""

    text: str

    @property
    def source(self) -> str:
        return self.text


class Markup(msgspec.Struct, frozen=True, gc=False):
    """Delimiters, which belong to no content."""

    source: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A call of one of the request's tools begins."""

    index: int
    """Calls of a choice are counted from 0."""
    name: str
    source: str = ""


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, as JSON; all of a call's texts, joined, are the arguments."""

    index: int
    text: str
    source: str = ""


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call is complete. A call that is cut has no end."""

    index: int
    source: str = ""


OutputEvent = TextDelta | ReasoningDelta | Markup | CallBegin | ArgumentsDelta | CallEnd


@attrs.frozen
class OutputRules:
    """How the output of a request's choices is read, for APIs that tell reasoning and calls from text."""

    tool_types: Mapping[str, ArgumentTypes] = attrs.field(factory=dict)
    """The tools that may be called, by name. Empty: none, so that calls are text."""
    max_calls: int | None = None
    """A choice ends with this many calls. None: any number."""


@attrs.frozen
class OutputFormat:
    """What the server knows of its model's output, chosen at start."""

    tool_call_parser: str | None = None
    """The name of the format in which calls are written. None: calls are not recognized."""
    reasoning_parser: str | None = None
    """The name of the format in which reasoning is written. None: reasoning is not separated."""
    reason: str = ""
    """Where the formats come from, for operators."""
    reasoning_tags: tuple[str, str] | None = None
    """What opens and what closes reasoning. None: nothing does, or not in one way."""
    template_variables: frozenset[str] = frozenset()
    """Those of `enable_thinking`, `reasoning_effort`, `thinking`, `documents`, … that the chat template reads."""
    has_short_call_ids: bool = False
    """The chat template accepts ids of nine letters and digits alone, as Mistral's."""
    call_form: CallForm | None = None
    """How calls are written. None: not known well enough to make the model write one."""
