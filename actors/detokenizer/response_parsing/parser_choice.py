"""Choose how the model's output is read: by name, by the checkpoint's own template, or by its chat template.

Called once, at start. What must always hold: calls and reasoning are chosen independently, and a template that is not
supported is never fatal: the reason says so, and the next source is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from .output_patterns import UnsupportedPattern
from .response_template import ResponseTemplate
from .shipped_templates import CALLS_BY_CHAT_TEMPLATE, REASONING, REASONING_BY_CHAT_TEMPLATE, TOOL_CALLS
from .template_building import Fields, Spec, build_template, read_fields

AUTO = "auto"
NONE = "none"
OWN = "response_template"
"""The name of the checkpoint's own format."""
PLAIN = "hermes"
"""The format of calls in plain text (`actors/tokenizer/plain_chat.py`)."""


class UnknownParser(ValueError):
    """No parser has this name. The message lists the known ones."""


@attrs.frozen
class Chosen:
    template: ResponseTemplate | None
    """None: all output is text."""
    tool_call_parser: str | None
    reasoning_parser: str | None
    reason: str
    own_calls: tuple[Spec, ...] = ()
    """The checkpoint's own format of calls, if that is chosen."""


def choose(
    tool_call_parser: str,
    reasoning_parser: str,
    own_template: dict[str, Any] | None,
    chat_template: str | None,
    special_ids: Mapping[str, int],
    *,
    is_plain: bool = False,
) -> Chosen:
    """Choose the formats of calls and of reasoning.

    `own_template` is the checkpoint's `response_template`, `special_ids` the ids of special tokens by text.
    `is_plain`: the model sees tools, or calls of earlier turns, as the plain text that stands in for what its chat
    template does not support. It may write calls in that form, too. Raises UnknownParser.
    """
    for kind, name, known in (
        ("tool call", tool_call_parser, TOOL_CALLS),
        ("reasoning", reasoning_parser, REASONING),
    ):
        if name not in known and name not in (AUTO, NONE):
            names = ", ".join((AUTO, NONE, *sorted(known)))
            raise UnknownParser(f"there is no {kind} parser {name[:80]!r}; known are {names}")
    reasons: list[str] = []
    own: Fields | None = None
    if own_template is not None and AUTO in (tool_call_parser, reasoning_parser):
        try:
            own = read_fields(own_template)
            build_template(own, own, special_ids)
        except UnsupportedPattern as error:
            own = None
            reasons.append(f"the checkpoint's response_template is not used: {error}")
    found = _first_in(chat_template or "", CALLS_BY_CHAT_TEMPLATE)
    calls_name, calls, why = _half(tool_call_parser, own if own and own.calls else None, TOOL_CALLS, found)
    if is_plain and tool_call_parser == AUTO and calls_name != PLAIN:
        plain = read_fields(TOOL_CALLS[PLAIN])
        calls = plain if calls is None else attrs.evolve(calls, calls=(*calls.calls, *plain.calls))
        calls_name, why = calls_name or PLAIN, f"{why}, and {PLAIN}, in which calls are shown to it"
    reasons.append(f"tool calls: {why}")
    found = _first_in(chat_template or "", REASONING_BY_CHAT_TEMPLATE)
    reasoning_name, reasoning, why = _half(reasoning_parser, own if own and own.reasoning else None, REASONING, found)
    reasons.append(f"reasoning: {why}")
    template = None
    if calls is not None or reasoning is not None:
        template = build_template(calls, reasoning, special_ids)
    own_calls = calls.calls if calls is not None and calls_name == OWN else ()
    return Chosen(template, calls_name, reasoning_name, "; ".join(reasons), own_calls)


def _half(
    name: str, own: Fields | None, shipped: Mapping[str, Mapping[str, Any]], found: str | None
) -> tuple[str | None, Fields | None, str]:
    """Return a format's name, the format, and where it comes from."""
    if name == NONE:
        return None, None, "off"
    if name != AUTO:
        return name, read_fields(shipped[name]), f"{name}, as configured"
    if own is not None:
        return OWN, own, "the checkpoint's response_template"
    if found is not None:
        return found, read_fields(shipped[found]), f"{found}, by the chat template"
    return None, None, "none, the chat template shows no known format"


def _first_in(chat_template: str, marks: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    return next((name for texts, name in marks if all(text in chat_template for text in texts)), None)
