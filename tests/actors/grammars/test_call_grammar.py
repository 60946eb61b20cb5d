"""What a grammar of calls accepts and rejects, in every format; the parser reads everything it accepts as calls."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quipu.actors.detokenizer.response_parsing.call_syntaxes import shipped_form
from quipu.actors.grammars.call_grammar import (
    GrammarTool,
    calls_or_json,
    calls_within_text,
    can_hold_within_text,
    forced_calls,
    json_alone,
)
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.grammars.tagged_values import MAX_OPTIONS
from quipu.actors.grammars.text_values import UnsupportedSchema
from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.byte_vocabulary import ByteVocabulary
from tests.call_grammars import SCHEMAS, TOKENS, TOOLS, TYPES, Family, family, matches, outputs
from tests.parsed_outputs import Call, parse, render_calls, template_of

FAMILIES = sorted(TOKENS)
OSLO: Call = ("get_weather", {"city": 'Øslo "1"', "days": 3})
ALL: Call = (
    "f",
    {
        "text": "a\n<b>{c}",
        "count": -5,
        "ratio": 0.5,
        "flag": True,
        "maybe": None,
        "things": [1, 2],
        "options": {"deep": False},
        "short": "é!",
        "one": 1,
        "day": "2026-11-22",
    },
)


def grammar(form: CallForm, *, several: bool = True, tools: list[GrammarTool] = TOOLS) -> str:
    return "".join(forced_calls(form, tools, several=several))


def written(one: Family, calls: list[Call]) -> str:
    """Return calls as a model of the family writes them with this vocabulary."""
    if one.name == "mistral" and one.vocabulary.added:
        return "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls
        )
    text = render_calls(one.name, calls)
    if one.name == "llama3_json":
        text = text.replace('"arguments": ', '"parameters": ')
    if not one.vocabulary.added:
        text = {
            "granite": text.replace("<|tool_call|>", "<tool_call>"),
            "llama3_json": text.removeprefix("<|python_tag|>"),
            "phi4_mini_json": text.replace("<|tool_call|>", "functools").removesuffix("<|/tool_call|>"),
        }.get(one.name, text)
    return text


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_natural_calls(name: str, has_tokens: bool) -> None:
    """Calls as the family writes them are accepted, one or several, with delimiters as tokens or as text."""
    one = family(name, has_tokens=has_tokens)
    rules = grammar(one.form)
    for calls in ([OSLO], [ALL], [OSLO, ALL, ("now", {})]):
        assert one.vocabulary.accepts(rules, written(one, calls)), written(one, calls)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_calls(name: str, has_tokens: bool) -> None:
    """Unknown names, wrong, missing and additional arguments, text, empty and unfinished outputs are rejected."""
    one = family(name, has_tokens=has_tokens)
    rules = grammar(one.form)
    for call in (
        ("get_whether", {"city": "Oslo"}),
        ("get_weather", {}),
        ("get_weather", {"city": "Oslo", "days": "soon"}),
        ("get_weather", {"city": "Oslo", "unit": "K"}),
        ("get_weather", {"city": "Oslo", "more": 1}),
        ("f", {**ALL[1], "short": "too long"}),
        ("f", {**ALL[1], "options": {"deep": 1}}),
        ("f", {**ALL[1], "day": "soon"}),
    ):
        assert not one.vocabulary.accepts(rules, written(one, [call])), call
    assert not one.vocabulary.accepts(rules, "")
    assert not one.vocabulary.begins(rules, "Let me see. " + written(one, [OSLO]))
    assert not one.vocabulary.accepts(rules, written(one, [OSLO])[:-2])


@pytest.mark.parametrize("name", FAMILIES)
def test_one_call(name: str) -> None:
    """If only one call is allowed, a second one is rejected."""
    one = family(name, has_tokens=True)
    rules = grammar(one.form, several=False)
    assert one.vocabulary.accepts(rules, written(one, [OSLO]))
    assert not one.vocabulary.accepts(rules, written(one, [OSLO, OSLO]))


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_written_is_read(name: str, has_tokens: bool) -> None:
    """The parser reads every accepted output as calls of the tools, with arguments that match their schemas."""
    one = family(name, has_tokens=has_tokens)
    found = outputs(one, grammar(one.form), 12)
    assert found
    for output in found:
        calls = one.calls(output)
        assert calls
        for tool, arguments in calls:
            assert matches(SCHEMAS[tool], arguments), (tool, arguments)


def test_tokens_of_delimiters() -> None:
    """A delimiter that is one token is written as that token, not in parts."""
    one = family("hermes", has_tokens=True)
    rules = grammar(one.form)
    assert one.vocabulary.matcher(rules).try_consume_tokens(list(b"<tool_call>")) == 0
    bare = family("hermes", has_tokens=False)
    assert bare.vocabulary.begins(grammar(bare.form), "<tool_call>\n{")


def test_calls_or_json() -> None:
    """An answer is either JSON that matches its schema, or calls, and nothing else."""
    one = family("hermes", has_tokens=True)
    rules = "".join(calls_or_json(one.form, TOOLS, '{"type":"object","required":["a"]}', several=True))
    assert one.vocabulary.accepts(rules, '{"a":1}') and one.vocabulary.accepts(rules, written(one, [OSLO]))
    assert not one.vocabulary.accepts(rules, '{"a": 1}') and not one.vocabulary.begins(rules, "Well")


def test_messages_before_calls() -> None:
    """A model of gpt-oss may reason in a message of its own before a forced call, or before JSON."""
    names = (*TOKENS["openai"], "<|end|>")
    vocabulary = ByteVocabulary(names, names)
    form = shipped_form("openai", vocabulary.added)
    assert form is not None
    thought, call = "<|channel|>analysis<|message|>Hm: {}\n<|end|><|start|>assistant", render_calls("openai", [OSLO])
    rules = grammar(form)
    assert vocabulary.accepts(rules, call) and vocabulary.accepts(rules, thought + call)
    assert not vocabulary.begins(rules, thought + thought) and not vocabulary.accepts(rules, thought)
    assert not vocabulary.begins(rules, "Well") and not vocabulary.begins(rules, thought + "Well")
    rules = "".join(calls_or_json(form, TOOLS, '{"type":"object"}', several=True))
    alone = "".join(json_alone(form, '{"type":"object"}'))
    for output in ('{"a":1}', '<|channel|>final<|message|>{"a":1}', call):
        assert vocabulary.accepts(rules, output) and vocabulary.accepts(rules, thought + output), output
        is_json = output != call
        assert vocabulary.accepts(alone, output) is vocabulary.accepts(alone, thought + output) is is_json, output
    template = template_of("openai", "openai_gptoss", vocabulary.added)
    pieces = [
        (token, vocabulary.tokens[token].decode()) if token > 255 else chr(token)
        for token in vocabulary.encode((thought + call).replace("Ø", "O"))
    ]
    parsed = parse(template, pieces, tools=TYPES)
    assert (parsed.reasoning, parsed.text, [name for name, _ in parsed.calls]) == ("Hm: {}", "", ["get_weather"])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama3_json", "openai")])
def test_calls_within_text(name: str) -> None:
    """Text is free until a call begins; the call must be complete, and match its schema if the tool is strict."""
    one = family(name, has_tokens=True)
    assert can_hold_within_text(one.form) and not can_hold_within_text(family(name, has_tokens=False).form)
    free = GrammarTool("free", SCHEMAS["get_weather"], "tools", "tools", is_held=False)
    rules = "".join(calls_within_text(one.form, [*TOOLS, free], several=True))
    vocabulary, call = one.vocabulary, written(one, [OSLO])
    for text in ("", "I do not need a tool, <b>thanks</b>.", call, f"Let me see.\n{call}"):
        assert vocabulary.accepts(rules, text), text
    assert vocabulary.accepts(rules, written(one, [("free", {"anything": "x"})]))
    assert not vocabulary.begins(rules, written(one, [("get_weather", {"anything": 1})]))
    assert not vocabulary.begins(rules, written(one, [("get_whether", {"city": "Oslo"})]))
    assert not vocabulary.accepts(rules, f"Let me see.\n{call[:-2]}")
    for marker in one.form.markers:  # written in parts, it would be read as the beginning of a call as well
        parts = list(marker.encode())
        assert vocabulary.matcher(rules).try_consume_tokens(parts) < len(parts), marker


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"patternProperties": {}}, "tools: the keyword `patternProperties`"),
    ({"properties": {"x": {"type": "string", "pattern": "a(?=b)"}}}, "tools.properties.x: the keyword `pattern`"),
    ({"properties": {"x": {"type": "string", "pattern": ["a"]}}}, "tools.properties.x: the keyword `pattern`"),
    ({"properties": {"x": {"type": "string", "format": "email"}}}, "tools.properties.x: the keyword `format`"),
    ({"properties": {"x": {"allOf": [{}]}}}, "tools.properties.x: the keyword `allOf`"),
    ({"properties": {"x": {"$ref": "https://example.com"}}}, "tools.properties.x: the keyword `$ref`"),
    (
        {"properties": {"x": {"type": ["string", "null"], "maxLength": 3}}},
        "tools.properties.x: the keyword `maxLength`",
    ),
    ({"properties": {"x": {"enum": ["</parameter>"]}}}, "cannot write one of these values"),
    ({"properties": {"x": {"anyOf": []}}}, "`anyOf` must be a list"),
    ({"properties": {"x": {"oneOf": [{"type": "number"}, {"const": 1}]}}}, "tools.properties.x: the keyword `oneOf`"),
    ({"properties": {"x": 5}}, "tools.properties.x: must be an object"),
    ({"properties": {"x": False}, "required": ["x"]}, "tools.properties.x: must be an object"),
    ({"properties": {"x": {"anyOf": [{"enum": ["a"] * MAX_OPTIONS}]}}}, "up to 512 alternatives"),
    ({"properties": {"x": {"type": "string", "maxLength": "1}/ | /x/"}}}, "`maxLength` must be an integer"),
    ({"properties": {"x": {"type": "string", "format": []}}}, "the keyword `format`"),
    ({"properties": {"x": {}}, "required": [{}]}, "not among"),
    ({"properties": {"a>b": {}}}, "cannot write this name"),
    ({"properties": {"x": {"type": "thing"}}}, "the type `thing`"),
    ({"required": ["x"]}, "not among"),
    ({"properties": []}, "must be an object"),
]


@pytest.mark.parametrize(("schema", "problem"), REFUSED)
def test_refused_schemas(schema: dict[str, Any], problem: str) -> None:
    """Keywords that cannot be enforced for arguments between tags are refused, with their paths."""
    form = family("qwen3_coder", has_tokens=False).form
    with pytest.raises(UnsupportedSchema) as refused:
        grammar(form, tools=[GrammarTool("f", schema, "tools", "name")])
    assert problem in str(refused.value)


ODD = st.recursive(
    st.sampled_from([None, True, 0, -1, 2.5, "", "x", "string", "object", "#/$defs/x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "enum", "const", "anyOf", "$ref", "minLength", "format", "properties", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["properties", "required", "$defs", "type"]), ODD, max_size=3),
    st.dictionaries(st.sampled_from(["x", "y"]), ODD, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_odd_schemas(schema: dict[str, Any], properties: dict[str, Any]) -> None:
    """Any schema, whatever it contains, is refused with UnsupportedSchema or becomes a grammar."""
    for name in ("gemma4", "qwen3_coder"):
        form = family(name, has_tokens=False).form
        for one in (schema, {**schema, "properties": properties}):
            tool = GrammarTool("f", one, "tools", "name")
            with suppress(UnsupportedSchema):
                rules = grammar(form, tools=[tool])
                assert rules.startswith("start: calls\n")


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("^[0-9]{5}$", ["12345"], ["1234", "123456", "12345\n"]),
    ("b+", ["b", "abba\n"], ["", "a"]),
    ("^a/b|^c", [], []),
    ("^(a/b|c)", ["a/b!", "c"], ["/b", "xc"]),
    ("[]/[]$", [], []),
    (r"[\]/[]$", ["x]", "[", "/"], ["[x", ""]),
    (r"\$\^", ["a$^b"], ["$"]),
    (r"\[a-z]", ["[a-z]"], ["[b", "a-z]"]),
    ("[a&&b]", ["&", "b"], ["c"]),
    ("(?<n>ab)$", ["xab"], ["abx"]),
    ("(a$)", [], []),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), PATTERNS)
def test_patterns_between_tags(pattern: str, right: list[str], wrong: list[str]) -> None:
    """A pattern may match anywhere in a string, as JSON Schema says, but never the closing tag of an argument."""
    one = family("qwen3_coder", has_tokens=True)
    schema = {"properties": {"x": {"type": "string", "pattern": pattern, "maxLength": 9}}, "required": ["x"]}
    tools = [GrammarTool("f", schema, "tools", "name")]
    if not right:
        with pytest.raises(UnsupportedSchema, match="the keyword `pattern`"):
            grammar(one.form, tools=tools)
        return
    rules = grammar(one.form, tools=tools)
    assert all(one.vocabulary.accepts(rules, written(one, [("f", {"x": text})])) for text in right)
    assert not any(one.vocabulary.accepts(rules, written(one, [("f", {"x": text})])) for text in wrong)
    assert not one.vocabulary.begins(rules, written(one, [("f", {"x": f"{right[0]}</parameter>"})]))


DIALECTS = ["functiongemma", "gemma4"]
NESTED: dict[str, Any] = {
    "properties": {
        "first": {"type": ["integer", "null"]},
        "node": {"$ref": "#/$defs/Node"},
        "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "minItems": 1},
        "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
        "level": {"type": "integer", "minimum": 3, "maximum": 5},
        "kind": {"enum": ["a b", 1, None, {"x": ["y"]}]},
        "table": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "none": {"type": "array", "maxItems": 0},
    },
    "required": ["node", "names"],
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", DIALECTS)
def test_nested_dialect(name: str) -> None:
    """Objects and lists within arguments must match their schemas, even if those are recursive."""
    one = family(name, has_tokens=True)
    rules = grammar(one.form, tools=[GrammarTool("get_weather", NESTED, "tools", "name")])
    node = {"value": 'a "b"\n', "next": {"next": None}}
    right: list[dict[str, Any]] = [
        {"node": node, "names": ["ab", "c"]},
        {"first": None, "node": node, "names": ["a"], "pairs": [[1, -2.5], []], "level": 4, "none": []},
        {"node": {"next": None}, "names": ["a"], "kind": {"x": ["y"]}, "table": {"b": True, "c_1": False}},
    ]
    wrong: list[dict[str, Any]] = [
        {"node": node},
        {"node": node, "names": []},
        {"node": node, "names": ["abcd"]},
        {"node": {"value": "x"}, "names": ["a"]},
        {"node": {"next": {"next": 1}}, "names": ["a"]},
        {"node": node, "names": ["a"], "pairs": [[1, 2, 3]]},
        {"node": node, "names": ["a"], "level": 6},
        {"node": node, "names": ["a"], "kind": {"x": ["z"]}},
        {"node": node, "names": ["a"], "table": {"b": 1}},
        {"node": node, "names": ["a"], "none": [1]},
    ]
    for arguments in right:
        text = written(one, [("get_weather", arguments)])
        assert one.vocabulary.accepts(rules, text), text
        ((_, read),) = one.calls(one.vocabulary.encode(text))
        assert json.loads(read) == arguments
    for arguments in wrong:
        assert not one.vocabulary.accepts(rules, written(one, [("get_weather", arguments)])), arguments


@pytest.mark.parametrize("schema", [NESTED, {}, {"properties": {"x": {}}}, {"additionalProperties": {"type": "array"}}])
@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_a_dialect_holds_is_read(name: str, schema: dict[str, Any]) -> None:
    """Arguments are read as JSON that matches their schema, whether it is nested or allows anything."""
    one = family(name, has_tokens=True)
    found = outputs(one, grammar(one.form, tools=[GrammarTool("get_weather", schema, "tools", "name")]), 12)
    assert found
    for output in found:
        for _, arguments in one.calls(output):
            assert matches(schema, arguments), arguments


REFUSED_DIALECT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"x": {"type": "string", "format": "email"}}}, "tools.properties.x: the keyword `format`"),
    ({"properties": {"x": {"items": {"not": {}}, "type": "array"}}}, "tools.properties.x.items: the keyword `not`"),
    ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "tools.properties.x: the keyword `uniqueItems`"),
    ({"properties": {"x": {"type": "array", "maxItems": 5000}}}, "must be integers of at most 1024"),
    ({"properties": {"x": {"allOf": [{}]}}}, "tools.properties.x: the keyword `allOf`"),
    ({"properties": {"x": {"$ref": "#/x"}}}, "tools.properties.x: the keyword `$ref`"),
    ({"properties": {"x": {"enum": ["<escape>"]}}}, "cannot write one of these values"),
    ({"properties": {"x": {"const": {"a-b": 1}}}}, "cannot write one of these values"),
    ({"properties": {"x": {"anyOf": []}}}, "`anyOf` must be a list"),
    ({"properties": {"a-b": {}}}, "tools.properties.a-b: the model's format of calls cannot write this name"),
    ({"properties": {f"x{number}": {} for number in range(65)}}, "too many properties that may be missing"),
    ({"properties": {"x": {"type": "thing"}}}, "the type `thing`"),
    ({"properties": {"x": 1}}, "tools.properties.x: must be an object"),
    ({"properties": {"x": False}, "required": ["x"]}, "tools.properties.x: must be an object"),
    ({"properties": {"x": {"format": "date"}}}, "tools.properties.x: the keyword `format`"),
    (
        {"properties": {"x": {"type": "string", "enum": ["a"], "format": "x"}}},
        "tools.properties.x: the keyword `format`",
    ),
    ({"required": ["x"]}, "not among"),
    ({"properties": {"x": {"type": "array", "minItems": 2, "maxItems": 1}}}, "`minItems` is larger than `maxItems`"),
    ({"properties": {"x": {"type": "string", "minLength": 2, "maxLength": 1}}}, "the keyword `minLength`"),
    ({"patternProperties": {}}, "tools: the keyword `patternProperties`"),
]


@pytest.mark.parametrize(("schema", "problem"), REFUSED_DIALECT)
def test_refused_by_a_dialect(schema: dict[str, Any], problem: str) -> None:
    """Keywords that cannot be enforced for arguments in a dialect are refused, with their paths."""
    with pytest.raises(UnsupportedSchema) as refused:
        grammar(family("functiongemma", has_tokens=True).form, tools=[GrammarTool("f", schema, "tools", "name")])
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "hermes"])
def test_what_every_format_enforces(name: str) -> None:
    """In every format, character classes are ASCII, and a property whose schema is false may not occur."""
    one = family(name, has_tokens=True)
    properties = {
        "x": {"type": "string", "pattern": r"^[\w-]\d\D[^\W]$"},
        "no": False,
        "none": {"type": "array", "items": False},
    }
    tool = GrammarTool("f", {"properties": properties, "required": ["x"]}, "tools", "name")
    rules = grammar_text(GrammarSpec(GrammarKind.LARK, grammar(one.form, tools=[tool]), "tools"))
    for arguments, is_right in (
        ({"x": "a1éb"}, True),
        ({"x": "é1éb"}, False),
        ({"x": "a\u07c0éb"}, False),
        ({"x": "a1éé"}, False),
        ({"x": "a1_b", "no": 1}, False),
        ({"x": "a1_b", "none": []}, True),
        ({"x": "a1_b", "none": [1]}, False),
    ):
        assert one.vocabulary.accepts(rules, written(one, [("f", arguments)])) == is_right, arguments


def test_refused_names() -> None:
    """A name that a format's delimiter cannot contain is refused; in JSON any name is possible."""
    tool = GrammarTool('a">\n', {}, "tools", "tools[0].name")
    with pytest.raises(UnsupportedSchema, match=r"tools\[0\]\.name: "):
        grammar(family("qwen3_coder", has_tokens=False).form, tools=[tool])
    with pytest.raises(UnsupportedSchema, match="name: "):
        grammar(family("gemma4", has_tokens=True).form, tools=[GrammarTool("a-b", {}, "tools", "name")])
    one = family("hermes", has_tokens=False)
    assert one.vocabulary.accepts(grammar(one.form, tools=[tool]), render_calls("hermes", [('a">\n', {})]))
