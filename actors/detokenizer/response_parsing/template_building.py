"""From `response_template` dictionaries, as transformers defines them, to the parser's `ResponseTemplate`.

The checkpoint's own dictionary and the shipped ones (`shipped_templates.py`) take the same way. A template outside the
supported subset is refused as a whole, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .delimiter_programs import Delimiter, Meaning
from .json_calls import ARGUMENT_KEYS
from .output_patterns import (
    Choice,
    Node,
    Sequence,
    UnsupportedPattern,
    literal,
    parse_pattern,
    with_special_tokens,
    without_leading_space,
)
from .response_template import CallFormat, CallStyle, ReasoningFormat, ResponseTemplate
from .special_tokens import SpecialTokens

Spec = Mapping[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALLS_FIELD = "tool_calls"
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each", "is_bare",
}  # fmt: skip

_ARGUMENTS = {f"{{{prefix}{key}}}" for prefix in ("", "content.") for key in ARGUMENT_KEYS}


@attrs.frozen
class Fields:
    """The fields of one template that the parser knows, by what they are for."""

    reasoning: Spec | None
    calls: tuple[Spec, ...]
    text: Spec


def read_fields(spec: object) -> Fields:
    """Sort the fields of a template. Raises UnsupportedPattern."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("fields"), Mapping):
        raise UnsupportedPattern("it has no object of fields")
    if spec.get("version", 1) != 1:
        raise UnsupportedPattern(f"version {str(spec['version'])[:20]} is not supported")
    if unknown := sorted(set(spec) - _KEYS):
        raise UnsupportedPattern(f"the key {str(unknown[0])[:80]!r} is not supported")
    reasoning, calls, text = None, [], {}
    for name, field in spec["fields"].items():
        fields = field if isinstance(field, list) else [field]
        for one in fields:
            if not isinstance(one, Mapping) or not set(one) <= _FIELD_KEYS:
                raise UnsupportedPattern(f"the form of field {name[:80]!r} is not supported")
        has_open = any(one.get("open") or one.get("open_pattern") for one in fields)
        if name == CALLS_FIELD and has_open:
            calls = fields
        elif name in REASONING_FIELDS and has_open:
            reasoning = field
        elif not has_open:
            text = field
        else:
            raise UnsupportedPattern(f"the field {name[:80]!r} is not supported")
    return Fields(reasoning, tuple(calls), text)


def build_template(calls: Fields | None, reasoning: Fields | None, special_ids: Mapping[str, int]) -> ResponseTemplate:
    """Combine the calls of one template with the reasoning of another. Raises UnsupportedPattern."""
    fields = [*(calls.calls if calls else ())]
    if reasoning and reasoning.reasoning:
        fields.append(reasoning.reasoning)
    text = (calls or reasoning or Fields(None, (), {})).text
    specials = SpecialTokens(special_ids, _texts([*fields, text]))
    builder = _Builder(specials)
    template = ResponseTemplate(
        reasoning=builder.reasoning(reasoning.reasoning) if reasoning and reasoning.reasoning else None,
        calls=tuple(builder.call(field, number) for number, field in enumerate(calls.calls if calls else ())),
        text_close=builder.delimiter(text, "close", Meaning.TEXT_CLOSE),
        strips=_strips(text),
        specials=specials,
        special_ids=frozenset(special_ids.values()),
    )
    template.compile()
    return template


def _texts(fields: list[Spec]) -> list[str]:
    """Return all strings in the fields, without the backslashes of patterns."""
    found: list[str] = []
    waiting: list[object] = [*fields]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found.append(one.replace("\\", ""))
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return found


def _strips(field: Spec) -> bool:
    arguments = field.get("content_args") or {}
    return bool(arguments.get("strip", True))


class _Builder:
    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials

    def pattern(self, field: Spec, side: str) -> Sequence | None:
        texts, pattern = field.get(side), field.get(f"{side}_pattern")
        if texts is not None and pattern is not None:
            raise UnsupportedPattern(f"{side} and {side}_pattern together are not supported")
        if pattern is not None:
            return parse_pattern(str(pattern))
        if texts is None:
            return None
        options: tuple[Node, ...] = tuple(literal(str(one)) for one in (texts if isinstance(texts, list) else [texts]))
        return Sequence((Choice(options),))

    def delimiter(self, field: Spec, side: str, meaning: Meaning, number: int = 0) -> Delimiter | None:
        node = self.pattern(field, side)
        if node is None:
            return None
        if meaning is not Meaning.CALL_CLOSE:
            node = without_leading_space(node)
        return Delimiter(meaning, with_special_tokens(node, self._specials.by_text), number)

    def reasoning(self, field: Spec) -> ReasoningFormat:
        if field.get("content", "text") != "text":
            raise UnsupportedPattern("reasoning that is not text is not supported")
        opens = self.delimiter(field, "open", Meaning.REASONING_OPEN)
        closes = self.delimiter(field, "close", Meaning.REASONING_CLOSE)
        if opens is None or closes is None:
            raise UnsupportedPattern("reasoning without a closing delimiter is not supported")
        texts = [self._single_text(field, side) for side in ("open", "close")]
        tags = (texts[0], texts[1]) if texts[0] and texts[1] else None
        return ReasoningFormat(opens, closes, tags, _strips(field))

    def _single_text(self, field: Spec, side: str) -> str | None:
        texts = field.get(side)
        if isinstance(texts, list):
            return texts[0] if len(texts) == 1 else None
        return texts if isinstance(texts, str) else None

    def call(self, field: Spec, number: int) -> CallFormat:
        opens = self.delimiter(field, "open", Meaning.CALL_OPEN, number)
        closes = self.delimiter(field, "close", Meaning.CALL_CLOSE, number)
        if opens is None:
            raise UnsupportedPattern("calls without an opening delimiter are not supported")
        return CallFormat(_style(field), opens, closes, bool(field.get("is_bare")))


def _style(field: Spec) -> CallStyle:
    content = field.get("content", "text")
    if content != "json" or field.get("content_args"):
        raise UnsupportedPattern(f"calls of content {str(content)[:40]!r} are not supported")
    transform = field.get("transform") or "{content}"
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if function == "{content}":
        return CallStyle.OBJECT
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments")
        if (name, arguments) == ("{name}", "{content}"):
            return CallStyle.ARGUMENTS
        if name in ("{content.name}", "{name}") and arguments in _ARGUMENTS:
            return CallStyle.OBJECT
    raise UnsupportedPattern("this transform is not supported")
