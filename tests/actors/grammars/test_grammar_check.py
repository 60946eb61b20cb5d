"""Which grammars are refused before anything is generated, and with which errors."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from tokenizers import Tokenizer

from quipu.actors.grammars.call_grammar import GrammarTool, forced_calls
from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.grammars.grammar_library import lark_grammar, load_grammars
from quipu.actors.messages.call_syntax import ArgumentStyle, CallForm, CallSyntax
from quipu.actors.messages.grammar import (
    MAX_IGNORED,
    GrammarKind,
    GrammarSpec,
    ignored_comment,
    ignored_within,
)
from quipu.actors.messages.outcomes import ErrorKind, RequestError
from tests.actors.tokenizer.tokenizer_kinds import BASES, byte_tokens
from tests.grammars import EOS, PARAM, PERSON, schema, tiny_grammars
from tests.tiny import TINY

K = GrammarKind
MAX_BYTES = 20_000
TYPES = ("null", "string")


def spec_of(kind: GrammarKind, source: Any) -> GrammarSpec:
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source), PARAM)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(K.JSON_OBJECT, ""),
        spec_of(K.JSON_SCHEMA, PERSON),
        spec_of(K.JSON_SCHEMA, True),
        spec_of(K.JSON_SCHEMA, {"title": "T", "description": "d", "default": 1, "examples": [1], "x-mine": {}}),
        spec_of(
            K.JSON_SCHEMA,
            {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        ),
        spec_of(K.REGEX, r"\d+(\.\d+)?"),
        spec_of(K.CHOICE, ["yes", 'a "quoted"\n\\ é ☃ text', "/x/i"]),
        spec_of(K.LARK, 'start: "a" | %json {"type": "integer"}'),
        spec_of(K.LARK, 'root ::= "a" | "(" root ")"'),
    ],
)
def test_supported_grammars(spec: GrammarSpec) -> None:
    """Every kind becomes text that the engine can compile."""
    text = GrammarChecker(tiny_grammars(), 9999).check(spec)
    assert isinstance(text, str), text
    tiny_grammars().compile(text)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (K.JSON_SCHEMA, {"properties": {"a/b": {"items": [{"not": {}}]}}}, ["`not` at `#/properties/a~1b/items/0`"]),
        (K.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, ["`uniqueItems` at `#`"]),
        (K.JSON_SCHEMA, {"type": "array", "contains": {}}, ["`contains`"]),
        (K.JSON_SCHEMA, {"type": "object", "propertyNames": {"pattern": "^a"}}, ["`propertyNames`"]),
        (K.JSON_SCHEMA, {"if": {}, "then": {}}, ["`if`"]),
        (K.JSON_SCHEMA, {"anyOf": [{"type": "string", "format": "klingon"}]}, ["`format` at `#/anyOf/0`", "klingon"]),
        (K.JSON_SCHEMA, {"type": "string", "pattern": "(?=a)b"}, ["look-ahead"]),
        (K.JSON_SCHEMA, {"oneOf": [{"type": "object"}, {"type": "object", "title": "B"}]}, ["oneOf"]),
        (
            K.JSON_SCHEMA,
            {"type": "object", "allOf": [{"properties": {"a": {}}}, {"maxProperties": 1}]},
            ["`maxProperties` at `#/allOf/1`"],
        ),
        (
            K.JSON_SCHEMA,
            {
                "type": "object",
                "allOf": [{"patternProperties": {"^a": {"type": "null"}}}, {"patternProperties": {"b$": {}}}],
            },
            ["`patternProperties` at `#/allOf/"],
        ),
        (K.JSON_SCHEMA, {"$ref": "http://example.com/s"}, ["example.com"]),
        (K.JSON_SCHEMA, {"type": "strnig"}, ["strnig"]),
        (K.JSON_SCHEMA, {"type": "integer", "minimum": 2, "maximum": 1}, []),
        (K.JSON_SCHEMA, False, ["must be an object"]),
        (K.JSON_SCHEMA, [], ["must be an object"]),
        (K.JSON_SCHEMA, "{", ["not valid JSON"]),
        (K.JSON_SCHEMA, "[" * 5000, ["not valid JSON"]),
        (K.JSON_SCHEMA, '{"a":' * 1500 + "1" + "}" * 1500, []),
        (K.REGEX, "ab[c-", ["invalid regular expression at character 3: unclosed character class."]),
        (K.REGEX, r"(a)\1", ["at character 4: backreferences are not supported."]),
        (K.REGEX, "ab\\\\\\", ["invalid regular expression: it ends with a backslash."]),
        (K.REGEX, "/a)", ["invalid regular expression: unopened group."]),
        (K.REGEX, r"a\b", ["lookarounds not supported"]),
        (K.REGEX, "(" * 9000, ["at character 9000: unclosed group."]),
        (K.CHOICE, "[]", ["non-empty"]),
        (K.CHOICE, '["a", 1]', ["list of strings"]),
        (K.CHOICE, "yes", ["not valid JSON"]),
        (K.LARK, 'begin: "a"', ["no start rule found."]),
        (K.LARK, "(((", ["line 1, column 1"]),
        (K.LARK, "\n", ["Empty grammar."]),
        (K.LARK, 'start: a\na: "x" | b', ["line 2, column 4: unknown name"]),
        (K.LARK, "start: T\nT: /a/ & ~/a/", ["it allows no output."]),
        (K.LARK, 'root ::= "a" |\n b', ["line 2 of the GBNF grammar: there is no rule `b`."]),
        (K.LARK, 'root ::= root "a"', ["`response_format`: it allows no output."]),
        (K.LARK, "start: <nothing>", ["unknown special token"]),
        (K.LARK, 'start: %json {"not": {}}', ["not"]),
        (
            K.JSON_SCHEMA,
            {"properties": {str(i): {} for i in range(498)}},
            ["`properties` at `#`", "at most 497 in a row"],
        ),
        (
            K.JSON_SCHEMA,
            {"anyOf": [{"type": "object", "properties": {str(i): {"type": t} for i in range(260)}} for t in TYPES]},
            ["2000"],
        ),
        (K.JSON_SCHEMA, {"enum": ["x" * MAX_BYTES]}, ["at most 20000 bytes"]),
        (K.REGEX, "☃" * 7000, ["at most 20000 bytes"]),
    ],
)
def test_refused_grammars(kind: GrammarKind, source: Any, words: list[str]) -> None:
    """A grammar that the library does not support in full is a client error that names the field."""
    error = GrammarChecker(tiny_grammars(), MAX_BYTES).check(spec_of(kind, source))
    assert isinstance(error, RequestError)
    assert error.kind is ErrorKind.INVALID and error.param == PARAM and f"`{PARAM}`" in error.message
    assert all(word in error.message for word in words), error.message
    assert len(error.message) < 1000


def test_choice_of_many_strings() -> None:
    """The maximum number of strings of a choice can be followed to their ends, even if one is a prefix of another."""
    choices = [*(f"{number} ways" for number in range(4094)), "9 ways to", ""]
    text = GrammarChecker(tiny_grammars(), 99_999).check(spec_of(K.CHOICE, choices))
    assert isinstance(text, str), text
    matcher, tokenizer = tiny_grammars().compile(text), Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for choice in ("9 ways", "9 ways to", "4093 ways", ""):
        assert matcher.accepts([*tokenizer.encode(choice, add_special_tokens=False).ids, EOS])
    assert not matcher.accepts([*tokenizer.encode("4094 ways", add_special_tokens=False).ids, EOS])


@pytest.mark.parametrize("base", [*BASES, "byte tokens"])
def test_any_tokenizer(base: str) -> None:
    """With a tokenizer that the library does not support, grammars are refused, and say so."""
    tokenizer = BASES.get(base, byte_tokens)()
    checker = GrammarChecker(load_grammars(tokenizer.to_str().encode(), (0,)), 9999)
    result = checker.check(schema(PERSON))
    assert isinstance(result, str) == (base in ("tiny", "qwen", "byte tokens"))
    assert isinstance(result, str) or (result.kind is ErrorKind.INVALID and "tokenizer" in result.message)


def test_time_is_bounded() -> None:
    """A grammar that takes too much CPU time is refused."""
    error = GrammarChecker(tiny_grammars(), 9999, 0.0).check(schema(PERSON))
    assert isinstance(error, RequestError) and "too long" in error.message


def test_calls_name_their_argument() -> None:
    """A keyword that the library does not know is refused with the argument's path, even if calls are not JSON."""
    syntax = CallSyntax(
        style=ArgumentStyle.TAGS,
        open="<call>{name}",
        close="</call>",
        argument_open="<{name}>",
        argument_close="</a>",
        value_ends=("</a>",),
    )
    tool = GrammarTool("f", {"properties": {"a": {"type": "array", "items": {"uniqueItems": True}}}}, "tools[1]", "")
    source = "".join(forced_calls(CallForm((syntax,)), [tool], several=False))
    refused = GrammarChecker(tiny_grammars(), 9999).check(GrammarSpec(K.LARK, source, "tools"))
    assert isinstance(refused, RequestError)
    assert "the keyword `uniqueItems` at `tools[1].properties.a#/items` is not supported" in refused.message


@pytest.mark.parametrize(
    ("value", "ignored"),
    [
        ({"type": "array", "uniqueItems": True}, "tools[1]#/properties/a/uniqueItems"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "tools[1]"),
        ({"$ref": "#/properties/a"}, "tools[1]#/properties/a/$ref"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "tools[1]"),
        ({"enum": [1, 2**60]}, "tools[1]#/properties/a/enum"),
    ],
)
def test_loose_schemas_are_never_refused(value: dict[str, Any], ignored: str) -> None:
    """Parts of a schema that cannot be enforced are dropped and named if the tool is not strict; if need be, all of
    it."""
    form = CallForm((CallSyntax(style=ArgumentStyle.OBJECT, open="<call>", close="</call>"),))
    one = {"properties": {"a": value, "b": {"type": "integer"}}, "required": ["a"]}
    tool = GrammarTool("f", one, "tools[1]", "", is_strict=False)
    text = GrammarChecker(tiny_grammars(), 19_999).check(
        GrammarSpec(K.LARK, "".join(forced_calls(form, [tool], several=True)), "tools")
    )
    assert isinstance(text, str), text
    assert ignored_within(text) == (ignored,)
    begin = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode('<call>{"name": "f", "arguments": {"a": [1, 1]')
    assert tiny_grammars().compile(text).accepts(begin.ids) == (value.get("type") != "integer" or ignored == "tools[1]")


def test_names_of_dropped_parts_are_bounded() -> None:
    """A grammar names a bounded number of the parts that were dropped, in bounded length, whatever their text."""
    paths = [f'tools[0]#/properties/{name}/"\\\n,☃%' for name in ("a", "x" * 3000)] * 100
    text = lark_grammar(f'start: "a"{ignored_comment(paths)}')
    tiny_grammars().compile(text)
    named = ignored_within(text)
    assert len(named) == MAX_IGNORED and named[0] == paths[0] and max(map(len, named)) <= 1024
    assert ignored_within(lark_grammar('start: "a"')) == () == ignored_within("")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"not": {}}, "the keyword `not` at `tools[1]#/properties/a` is not supported ("),
        ({"type": "string", "pattern": "("}, "the keyword `pattern` at `tools[1]#/properties/a` is not supported ("),
    ],
)
def test_calls_name_their_tool(keywords: dict[str, Any], told: str) -> None:
    """The error about a grammar of calls names the tool whose schema is not supported, and does not quote the
    grammar."""
    form = CallForm((CallSyntax(style=ArgumentStyle.OBJECT, open="<call>", close="</call>"),))
    schemas: list[dict[str, Any]] = [{}, {"properties": {"a": keywords}}]
    tools = [GrammarTool(f"f{number}", one, f"tools[{number}]", "") for number, one in enumerate(schemas)]
    source = "".join(forced_calls(form, tools, several=True))
    refused = GrammarChecker(tiny_grammars(), 9999).check(GrammarSpec(K.LARK, source, "tools"))
    assert isinstance(refused, RequestError)
    assert told in refused.message and "\n" not in refused.message
    odd = "".join(forced_calls(form, [attrs.evolve(tools[1], name="%json x")], several=True))
    assert isinstance(GrammarChecker(tiny_grammars(), 9999).check(GrammarSpec(K.LARK, odd, "tools")), RequestError)


@pytest.mark.parametrize("kind", [K.JSON_SCHEMA, K.LARK])
def test_values_at_the_limit_of_the_stack(kind: GrammarKind) -> None:
    """However deep the values of a schema are, it is served or refused, and the checking process goes on."""
    checker = GrammarChecker(tiny_grammars(), MAX_BYTES)
    for depth in range(900, 1024):
        source = f'{{"oneOf": [{{"const": {"[" * depth}{"]" * depth}}}, {{"const": 1}}]}}'
        found = checker.check(spec_of(kind, source if kind is K.JSON_SCHEMA else f"start: %json {source}"))
        assert isinstance(found, RequestError) and found.kind is ErrorKind.INVALID and found.param == PARAM
