"""Try the keywords of JSON Schema, and write what came of it: `python -m scripts.grammar_keywords`.

Each keyword has a schema, texts that match it and texts that do not. It is *enforced* if all of the first are possible
outputs and none of the second is, *refused* if the schema does not compile, and *too strict* if texts are missing that
match. The table goes into `docs/use/structured-output.md`, between two markers. With `--check` nothing is written, and
the exit code is 1 if the document is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from quipu.actors.grammars.grammar_library import GrammarError
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "use" / "structured-output.md"
BEGIN = "<!-- made by `python -m scripts.grammar_keywords` -->"
END = "<!-- end of the table -->"


@attrs.frozen
class Example:
    keyword: str
    schema: dict[str, Any]
    good: tuple[str, ...]
    bad: tuple[str, ...]


def _of(keyword: str, schema: dict[str, Any], good: Sequence[str], bad: Sequence[str]) -> Example:
    return Example(keyword, schema, tuple(good), tuple(bad))


_AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
_STRING: dict[str, Any] = {"type": "string"}
_NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
EXAMPLES = (
    _of("type", {"type": "integer"}, ["5", "-3"], ['"5"', "5.5", "null"]),
    _of("type, a list", {"type": ["string", "null"]}, ['"x"', "null"], ["1"]),
    _of("enum", {"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    _of("const", {"const": {"a": 1}}, ['{"a":1}'], ['{"a":2}', "{}"]),
    _of("minimum, maximum (integer)", {"type": "integer", "minimum": 2, "maximum": 12}, ["2", "12"], ["1", "13"]),
    _of("minimum, maximum (number)", {"type": "number", "minimum": 0.5, "maximum": 1}, ["0.75", "1"], ["0.4", "1.1"]),
    _of("exclusiveMinimum, exclusiveMaximum", {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4}, ["3"],
        ["2", "4"]),
    _of("exclusiveMinimum in a range below 1", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1"],
        ["0"]),
    _of("numbers beyond 2<sup>53</sup>", {"const": 2**53 + 1}, [str(2**53 + 1)], [str(2**53 + 2)]),
    _of("multipleOf (integer)", {"type": "integer", "multipleOf": 5}, ["0", "10"], ["7"]),
    _of("minLength, maxLength", {"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"äöü"'],
        ['"a"', '"abcd"']),
    _of("pattern", {"type": "string", "pattern": "^[ab]+$"}, ['"ab"'], ['"c"', '""']),
    _of("pattern, unanchored", {"type": "string", "pattern": "ab"}, ['"xaby"'], ['"xy"']),
    _of("pattern with look-around", {"type": "string", "pattern": "^(?!a)b"}, ['"b"'], ['"ab"']),
    _of("pattern with a back-reference", {"type": "string", "pattern": r"^(a|b)\1$"}, ['"aa"'], ['"ab"']),
    _of("pattern with an escape that ECMA 262 lacks", {"type": "string", "pattern": r"\Aa"}, ['"ab"'], ['"ba"']),
    _of("pattern with maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 2}, ['"aa"'], ['"aaa"', '"b"']),
    *(
        _of(f"format `{name}`", {"type": "string", "format": name}, [json.dumps(good)], [json.dumps(bad)])
        for name, good, bad in (
            ("date", "2026-11-22", "2026-02-29"),
            ("date-time", "2026-11-22T10:00:00Z", "today"),
            ("time", "10:00:00Z", "ten"),
            ("duration", "P1D", "a day"),
            ("email", "a@b.org", "a"),
            ("hostname", "example.org", "a b"),
            ("ipv4", "10.0.0.1", "10.0.0"),
            ("ipv6", "::1", "x"),
            ("uri", "https://example.org/x", "a b"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
            ("regex", "a+", "("),
            ("json-pointer", "/a/b", "a"),
            ("anything-else", "x", ""),
        )
    ),
    _of("properties, required", {"type": "object", "properties": _AB, "required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"b":2}', '{"a":"x"}']),
    _of("properties in another order", {"type": "object", "properties": _AB}, ['{"b":2,"a":1}'], []),
    _of("required, not in properties", {"type": "object", "required": ["z"]}, ['{"z":1}'], ["{}"]),
    _of("additionalProperties: false", {"type": "object", "properties": _AB, "additionalProperties": False},
        ['{"a":1}'], ['{"c":1}']),
    _of("additionalProperties, a schema", {"type": "object", "additionalProperties": {"type": "integer"}},
        ['{"x":1}', "{}"], ['{"x":"y"}']),
    _of("patternProperties", {"type": "object", "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False}, ['{"xy":1}'], ['{"xy":"a"}', '{"a":1}']),
    _of("patternProperties that overlap",
        {"type": "object", "patternProperties": {"^x": {}, "y$": {"type": "integer"}}}, ['{"xy":1}'], ['{"xy":"a"}']),
    _of("propertyNames that allow any", {"type": "object", "propertyNames": _STRING}, ['{"ab":1}'], ["[]"]),
    _of("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"ab":1}'], ['{"b":1}']),
    _of("minProperties, maxProperties", {"type": "object", "minProperties": 1, "maxProperties": 1}, ['{"a":1}'],
        ["{}", '{"a":1,"b":2}']),
    _of("minProperties: 2", {"type": "object", "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1,"a":1}']),
    _of("dependentRequired", {"type": "object", "properties": _AB, "dependentRequired": {"a": ["b"]}},
        ['{"a":1,"b":2}'], ['{"a":1}']),
    _of("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"a":1,"b":2}'],
        ['{"a":1}']),
    _of("unevaluatedProperties", {"type": "object", "properties": _AB, "unevaluatedProperties": False}, ['{"a":1}'],
        ['{"c":1}']),
    _of("unevaluatedProperties beside allOf", {"type": "object", "allOf": [{"properties": _AB}],
        "unevaluatedProperties": False}, ['{"a":1}'], ['{"c":1}']),
    _of("an object without keywords", {"type": "object"}, ["{}", '{"a":[1,{"b":null}]}'], ["[]"]),
    _of("the empty schema", {}, ["1", '"x"', "{}", "[1]"], ["x"]),
    _of("items", {"type": "array", "items": {"type": "integer"}}, ["[]", "[1,2]"], ['["x"]']),
    _of("prefixItems", {"type": "array", "prefixItems": [{"type": "integer"}, _STRING], "items": False}, ['[1,"x"]'],
        ['["x",1]', '[1,"x",2]']),
    _of("items, a list (until 2019-09)", {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        ["[1]"], ['["x"]', "[1,2]"]),
    _of("unevaluatedItems", {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, ["[1]"],
        ["[1,2]"]),
    _of("minItems, maxItems", {"type": "array", "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
    _of("uniqueItems", {"type": "array", "uniqueItems": True}, ["[1,2]"], ["[1,1]"]),
    _of("contains", {"type": "array", "contains": {"const": 1}}, ["[2,1]"], ["[2]"]),
    _of("anyOf", {"anyOf": [{"type": "integer"}, _STRING]}, ["1", '"x"'], ["null"]),
    _of("oneOf, disjoint", {"oneOf": [{"type": "integer"}, _STRING]}, ["1", '"x"'], ["null"]),
    _of("oneOf, told apart by a const", {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}]},
        ['{"kind":"a"}', '{"kind":"b"}'], ['{"kind":"c"}']),
    _of("oneOf, disjoint ranges", {"oneOf": [{"type": "number", "minimum": 5}, {"type": "number",
        "exclusiveMaximum": 5}]}, ["5", "4.5"], ['"x"']),
    _of("oneOf, overlapping", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["1.5"], ["1"]),
    _of("allOf", {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 5}]}, ["3"], ["1", "6"]),
    _of("allOf of objects", {"allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}]}, ['{"a":1,"b":2}'],
        ['{"a":1}']),
    _of("not", {"type": "integer", "not": {"const": 3}}, ["4"], ["3"]),
    _of("if, then, else", {"if": {"type": "integer"}, "then": {"minimum": 2}, "else": {"type": "string"}}, ["2", '"x"'],
        ["1"]),
    _of("$ref to $defs", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, ["1"], ['"x"']),
    _of("$ref to definitions", {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}}, ["1"], ['"x"']),
    _of("$ref, recursive", {"$ref": "#/$defs/node", "$defs": {"node": _NODE}}, ['{"next":{"next":{}}}'],
        ['{"next":1}']),
    _of("$ref to another document", {"$ref": "https://example.org/schema"}, ["1"], []),
    _of("$ref to an id", {"$ref": "n", "$defs": {"x": {"$id": "n", "type": "integer"}}}, ["1"], ['"x"']),
    _of("$ref with escapes, into a list", {"$ref": "#/$defs/a~1b%25/0", "$defs": {"a/b%": [{"type": "integer"}]}},
        ["1"], ['"x"']),
    _of("$ref with keywords beside it", {"$ref": "#/$defs/n", "minimum": 2, "$defs": {"n": {"type": "integer"}}}, ["2"],
        ["1", '"x"']),
    _of("$anchor", {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}}, ["1"], ['"x"']),
    _of("$dynamicRef", {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}}, ["1"],
        ['"x"']),
    _of("$recursiveRef", {"type": ["array", "null"], "items": {"$recursiveRef": "#"}}, ["[null]"], ["[1]"]),
    _of("$schema of any kind", {"$schema": "https://example.org/mine", "type": "integer"}, ["1"], ['"x"']),
    _of("title, description, default, examples", {"type": "integer", "title": "x", "description": "x", "default": 1,
        "examples": [1]}, ["1"], ['"x"']),
    _of("contentEncoding, contentMediaType", {"type": "string", "contentEncoding": "base64",
        "contentMediaType": "image/png"}, ['"YQ=="'], ["1"]),
    _of("nullable (OpenAPI)", {"type": "integer", "nullable": True}, ["1", "null"], ['"x"']),
    _of("an unknown keyword", {"type": "integer", "x-mine": 1, "mine": 2}, ["1"], ['"x"']),
    _of("keys with escapes", {"type": "object", "properties": _AB}, ['{"a":1}'], [r'{"\u0061":"x"}']),
    _of("strings with control characters", _STRING, [r'"a\n"', r'"\u0001"'], ["1"]),
    _of("white space between values", {"type": "array"}, ["[1,2]"], ["[1, 2]", "[ 1,2]"]),
)  # fmt: skip


class _Bytes:
    """A vocabulary of bytes, and one token that ends an output."""

    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def verdict(example: Example, tokenizer: LLTokenizer) -> str:
    """Return what becomes of a schema's keyword."""
    try:
        grammar = grammar_text(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(example.schema), "schema"))
    except GrammarError:
        return "refused"

    def is_output(text: str) -> bool:
        matcher, tokens = LLMatcher(tokenizer, grammar, log_level=0), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error() or matcher.get_grammar_warnings():
        return "refused"
    if any(is_output(text) for text in example.bad):
        return "**not enforced**"
    return "enforced" if all(is_output(text) for text in example.good) else "too strict"


def table() -> str:
    """Return the table of all examples."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, slices=[])
    rows = [(one.keyword, verdict(one, tokenizer), _shown(one.good), _shown(one.bad)) for one in EXAMPLES]
    head = "| keyword | | matches | does not |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def _shown(texts: Sequence[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def updated(document: str) -> str:
    """Return the document with a new table."""
    before, _, rest = document.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is out of date")
    options = parser.parse_args(arguments)
    document = DOCUMENT.read_text(encoding="utf-8")
    if options.check:
        return int(document != updated(document))
    DOCUMENT.write_text(updated(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
