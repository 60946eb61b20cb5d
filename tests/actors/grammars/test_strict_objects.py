"""Under `strict`, objects may only have properties that their schemas declare; without it, they may have others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quipu.actors.grammars.call_grammar import GrammarTool, forced_calls
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.call_grammars import family

A = {"a": {"type": "integer"}}
OPEN = {"type": "object", "properties": A}


def accepts(schema: dict[str, Any], arguments: Any, *, is_strict: bool) -> bool:
    one = family("hermes", has_tokens=True)
    tool = GrammarTool("f", schema, "tools[0]", "name", is_strict=is_strict)
    rules = "".join(forced_calls(one.form, [tool], several=False))
    text = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"
    return one.vocabulary.accepts(grammar_text(GrammarSpec(GrammarKind.LARK, rules, "tools")), text)


@pytest.mark.parametrize(
    ("schema", "good", "odd"),
    [
        (OPEN, {"a": 1}, {"a": 1, "b": 2}),
        ({"type": "object", "properties": {}}, {}, {"b": 2}),
        ({"properties": {"o": {"type": "array", "items": OPEN}}}, {"o": [{"a": 1}]}, {"o": [{"b": 1}]}),
        ({"properties": {"o": {"anyOf": [OPEN, {"type": "null"}]}}}, {"o": {"a": 1}}, {"o": {"b": 1}}),
        ({"properties": {"o": {"$ref": "#/$defs/o"}}, "$defs": {"o": OPEN}}, {"o": {"a": 1}}, {"o": {"b": 1}}),
    ],
)
def test_strict_objects_are_closed(schema: dict[str, Any], good: Any, odd: Any) -> None:
    """An undeclared property is forbidden at every level, but only under `strict`."""
    assert accepts(schema, good, is_strict=True) and not accepts(schema, odd, is_strict=True)
    assert accepts(schema, good, is_strict=False) and accepts(schema, odd, is_strict=False)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"type": "object"}, {"b": 1}),
        ({**OPEN, "additionalProperties": True}, {"b": 1}),
        ({**OPEN, "additionalProperties": {"type": "integer"}}, {"a": 1, "b": 1}),
        ({**OPEN, "patternProperties": {"^b": {"type": "integer"}}}, {"b": 1}),
        ({"allOf": [OPEN, {"properties": {"b": {"type": "integer"}}}]}, {"a": 1, "b": 1}),
        ({**OPEN, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {"b": {}}}}}, {"a": 1, "b": 1}),
        (
            {**OPEN, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"properties": {"c": {}}}]},
            {"a": 1, "b": 1},
        ),
    ],
)
def test_combined_declarations_stay_possible(schema: dict[str, Any], good: Any) -> None:
    """`strict` keeps explicit rules about other properties, and allows what combined schemas declare together."""
    assert accepts(schema, good, is_strict=True)
