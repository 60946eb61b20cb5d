"""From `response_template` dictionaries, as transformers defines them, to the parser's `ResponseTemplate`.

The checkpoint's own dictionary is built like the shipped ones (`shipped_templates.py`). A template outside the
supported subset is refused as a whole, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .delimiter_programs import Delimiter, DelimiterPrograms, Meaning
from .delimiter_scanner import Hold
from .json_calls import ARGUMENT_KEYS
from .output_patterns import (
    ANY,
    SPACES,
    CharSet,
    Choice,
    Group,
    Node,
    Repeat,
    Sequence,
    UnsupportedPattern,
    flat,
    literal,
    parse_pattern,
    with_special_tokens,
    without_leading_space,
)
from .response_template import CallFormat, CallStyle, DialectFormat, ReasoningFormat, ResponseTemplate, TagFormat
from .special_tokens import SpecialTokens

Spec = Mapping[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALLS_FIELD = "tool_calls"
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each", "is_bare",
}  # fmt: skip

_LAZY: list[list[Node]] = [[Repeat(ANY, least, None, True)] for least in (0, 1)]
_ARGUMENTS = [f"{{{prefix}{key}}}" for prefix in ("", "content.") for key in ARGUMENT_KEYS]


@attrs.frozen
class Fields:
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
        fields = field if isinstance(field, list) and name == CALLS_FIELD else [field]
        if not all(_is_field(one) for one in fields):
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


def _is_field(field: object) -> bool:
    if not isinstance(field, Mapping) or not set(field) <= _FIELD_KEYS:
        return False
    texts = [field[key] for key in ("open", "close") if key in field]
    each = [one for text in texts for one in (text if isinstance(text, list) else [text])]
    each += [field[key] for key in ("open_pattern", "close_pattern", "content") if key in field]
    arguments = field.get("content_args", {})
    delimiters = arguments.get("string_delims", []) if isinstance(arguments, Mapping) else None
    return (
        all(isinstance(text, str) and text for text in each)
        and [] not in texts
        and isinstance(arguments, Mapping)
        and isinstance(arguments.get("value_parser", {}), Mapping)
        and isinstance(delimiters, list)
        and all(isinstance(pair, list) and all(isinstance(one, str) and one for one in pair) for pair in delimiters)
    )


def build_template(calls: Fields | None, reasoning: Fields | None, special_ids: Mapping[str, int]) -> ResponseTemplate:
    """Combine the calls of one template with the reasoning of another. Raises UnsupportedPattern."""
    fields = [*(calls.calls if calls else ())]
    if reasoning and reasoning.reasoning:
        fields.append(reasoning.reasoning)
    text = (calls or reasoning or Fields(None, (), {})).text
    specials = SpecialTokens(special_ids, _texts([*fields, text]))
    builder = _Builder(specials)
    return ResponseTemplate(
        reasoning=builder.reasoning(reasoning.reasoning) if reasoning and reasoning.reasoning else None,
        calls=[builder.call(field, number) for number, field in enumerate(calls.calls if calls else ())],
        text_close=builder.text_close(text),
        strips=_strips(text),
        specials=specials,
        special_ids=special_ids.values(),
    )


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
    arguments = field.get("content_args", {})
    return bool(not isinstance(arguments, Mapping) or arguments.get("strip", True))


@attrs.frozen
class _Builder:
    _specials: SpecialTokens

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

    def text_close(self, field: Spec) -> Delimiter | None:
        """Return the end of a turn, or None if it is not supported: what ends a turn ends the output, too."""
        try:
            closes = self.delimiter(field, "close", Meaning.TEXT_CLOSE)
            DelimiterPrograms([] if closes is None else [closes])
        except UnsupportedPattern:
            return None
        return closes

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
        has_name = _has_name(self.pattern(field, "open"))
        style, content = call_style(field), field.get("content", "text")
        arguments = field.get("content_args", {})
        if has_name is not (style is CallStyle.ARGUMENTS):
            raise UnsupportedPattern("a name that does not come from where the transform takes it is not supported")
        tags = dialect = None
        if content == "xml-inline" and style is CallStyle.ARGUMENTS:
            tags = self._xml(arguments)
        elif content == "kv-lines" and style is CallStyle.ARGUMENTS:
            tags = self._lines(arguments)
        elif content == "json" and set(arguments) & {"string_delims", "unquoted_keys"} and style is CallStyle.ARGUMENTS:
            dialect = self._dialect(arguments)
        elif content != "json" or set(arguments) - {"allow_non_json"}:
            raise UnsupportedPattern(f"calls of content {str(content)[:40]!r} with these arguments are not supported")
        if closes is None and (tags or dialect):
            raise UnsupportedPattern("such calls without a closing delimiter are not supported")
        return CallFormat(style, opens, closes, tags, dialect, bool(field.get("is_bare")))

    def _programs(self, items: list[Node], meaning: Meaning) -> DelimiterPrograms:
        node = with_special_tokens(Sequence(tuple(items)), self._specials.by_text)
        return DelimiterPrograms([Delimiter(meaning, node)])

    def _xml(self, arguments: Spec) -> TagFormat:
        if arguments.get("merge_duplicates"):
            raise UnsupportedPattern("merge_duplicates is not supported")
        items = flat(parse_pattern(str(arguments.get("tag_pattern", ""))).items)
        groups = [at for at, item in enumerate(items) if isinstance(item, Group)]
        if len(groups) != 2 or [item.name for item in items if isinstance(item, Group)] != ["key", "value"]:
            raise UnsupportedPattern("a tag_pattern without a key and a value after it is not supported")
        value = items[groups[1]]
        assert isinstance(value, Group)
        if flat((value.item,)) not in _LAZY:
            raise UnsupportedPattern("a tag_pattern whose value is not .*? is not supported")
        head, tail = items[: groups[1]], items[groups[1] + 1 :]
        return self._tags(head, tail, arguments.get("value_parser"))

    def _lines(self, arguments: Spec) -> TagFormat:
        line_end, separator = str(arguments.get("line_sep", "\n")), str(arguments.get("kv_sep", ":"))
        if not line_end or not separator:
            raise UnsupportedPattern("an empty separator is not supported")
        key = Repeat(CharSet(frozenset(line_end[0] + separator[0]), negated=True), 1, None)
        head: list[Node] = [Group("key", key), literal(separator)]
        head.append(Repeat(CharSet(frozenset(" \t\n") - set(line_end)), 0, None))
        return self._tags(head, [SPACES, literal(line_end)], arguments.get("value_parser"))

    def _tags(self, head: list[Node], tail: list[Node], value_parser: Spec | None) -> TagFormat:
        parser = dict(value_parser or {})
        if parser.get("name", "text") not in ("text", "json") or set(parser) - {"name", "args"}:
            raise UnsupportedPattern("this value_parser is not supported")
        is_json = parser.get("name") == "json"
        if value_parser and not is_json and _strips({"content_args": parser.get("args", {})}):
            head, tail = [*head, SPACES], [SPACES, *tail]
        hold = Hold.NOTHING
        if tail and tail[0] == SPACES:
            hold, tail = Hold.SPACE, tail[1:]
        elif tail and tail[0] == Repeat(CharSet(frozenset("\n")), 0, 1):
            hold, tail = Hold.NEWLINE, tail[1:]
        return TagFormat(
            self._programs(head, Meaning.ARGUMENT_OPEN), self._programs(tail, Meaning.ARGUMENT_CLOSE), hold, is_json
        )

    def _dialect(self, arguments: Spec) -> DialectFormat:
        quotes = {str(text) for pair in arguments.get("string_delims", ()) for text in pair}
        if len(quotes) > 1 or set(arguments) - {"string_delims", "unquoted_keys"}:
            raise UnsupportedPattern("strings that begin and end differently are not supported")
        delimiters = [
            Delimiter(Meaning.ARGUMENT_OPEN, with_special_tokens(literal(text), self._specials.by_text))
            for text in quotes
        ]
        return DialectFormat(DelimiterPrograms(delimiters), bool(arguments.get("unquoted_keys")))


def _has_name(node: Sequence | None) -> bool:
    names = [item.name for item in flat(node.items) if isinstance(item, Group)] if node else []
    if names not in ([], ["name"]):
        raise UnsupportedPattern(f"the group {names[0][:40]!r} is not supported")
    return bool(names)


def call_style(field: Spec) -> CallStyle:
    """Return where a call's name is. Raises UnsupportedPattern."""
    transform = field.get("transform", "{content}")
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
