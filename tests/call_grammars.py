"""Tools, vocabularies and formats for the tests of grammars that make a model call tools."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import attrs
import orjson

from quipu.actors.detokenizer.response_parsing.call_syntaxes import shipped_form
from quipu.actors.detokenizer.response_parsing.response_template import ResponseTemplate
from quipu.actors.grammars.call_grammar import GrammarTool
from quipu.actors.grammars.tool_types import types_by_property
from quipu.actors.messages.call_syntax import CallForm
from quipu.actors.messages.output import ArgumentTypes
from tests.byte_vocabulary import ByteVocabulary
from tests.parsed_outputs import PLAIN, deepseek, parse, template_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ALL_TYPES = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Some text."},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "things": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "options": {"$ref": "#/$defs/Options"},
        "short": {"type": "string", "minLength": 1, "maxLength": 5},
        "one": {"const": 1},
        "day": {"type": "string", "format": "date"},
    },
    "$defs": {
        "Options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False}
    },
    "required": ["text", "flag", "options"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "f": ALL_TYPES, "now": {"additionalProperties": False}}
TOOLS = [GrammarTool(name, schema, "tools", "tools") for name, schema in SCHEMAS.items()]
TYPES: dict[str, ArgumentTypes] = {
    name: {key: types for key, types in types_by_property(schema) if types} for name, schema in SCHEMAS.items()
}
_DEEPSEEK = tuple(deepseek(f"[{name}]") for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"))
TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": ("<|tool_call|>",),
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
"""The delimiters that are tokens in the vocabularies of each family."""


@attrs.frozen
class Family:
    """One format of calls before one vocabulary."""

    name: str
    vocabulary: ByteVocabulary
    form: CallForm
    template: ResponseTemplate

    def calls(self, output: list[int]) -> list[tuple[str, str]]:
        """Return the calls that the parser reads in an output, whole ones and nothing else."""
        tokens = self.vocabulary.tokens
        pieces: list[tuple[int, str]] = []
        waiting = b""
        for token in output:
            if token < 256:
                waiting += tokens[token]
                continue
            pieces += [(PLAIN, waiting.decode()), (token, tokens[token].decode())]
            waiting = b""
        parsed = parse(self.template, [*pieces, (PLAIN, waiting.decode())], tools=TYPES)
        assert (parsed.text, parsed.num_ended) == ("", len(parsed.calls)), parsed
        return parsed.calls


@cache
def family(name: str, *, has_tokens: bool) -> Family:
    vocabulary = ByteVocabulary(TOKENS[name] if has_tokens else (), TOKENS[name] if has_tokens else ())
    form = shipped_form(name, vocabulary.added)
    assert form is not None
    return Family(name, vocabulary, form, template_of(name, special_ids=vocabulary.added))


@cache
def _schema_matcher() -> ByteVocabulary:
    return ByteVocabulary()


def matches(schema: dict[str, Any], arguments: str) -> bool:
    """Return whether arguments in the schema's order match it. (The library's JSON lacks the character DEL.)"""
    grammar = f"start: %json {orjson.dumps({'type': 'object', **schema}).decode()}"
    return _schema_matcher().accepts(grammar, arguments.replace("\x7f", "?"))


def outputs(one: Family, grammar: str, count: int) -> list[list[int]]:
    """Return outputs of a model that knows nothing, under the grammar's mask."""
    found = [one.vocabulary.walk(grammar, Random(seed)) for seed in range(count)]
    return [output for output in found if output is not None]
