"""What the output of a random request may have to look like: schemas, patterns, grammars, structural tags.

Hypothesis strategies for `bodies.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from bench.body_parts import CHAT, COMPLETIONS, DECLARED, JUNK, MESSAGES, NAME, RESPONSES, SCHEMA, TEXT, mostly

HELD = st.sampled_from(
    [
        {},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        {"type": "string", "pattern": "^[A-F]{2,4}$"},
        {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"properties": {f"p{number}": {} for number in range(300)}},
        {"type": "object", "properties": {f"p{number}": {} for number in range(600)}},
        {"enum": [f"value {number}" for number in range(300)]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": "klingon"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"not": {}},
    ]
)
"""Schemas of formats: large and small ones, and some that are refused."""
GRAMMAR_SCHEMA = mostly(HELD | SCHEMA | DECLARED, JUNK)
PATTERN = mostly(
    st.sampled_from(["A+", "[a-z]{3}[0-9]*", r"(yes|no)\.", "(a?){50}b", "(a{300}){65536}|x1", ""]), TEXT | JUNK
)
OPTIONS = mostly(st.lists(st.text(max_size=5), min_size=1, max_size=4), st.lists(JUNK, max_size=3) | JUNK)
SOURCE = mostly(
    st.sampled_from(
        [
            'start: "A" | %json {"type": "integer"}',
            'root ::= "A" | "(" root ")"',
            "start: /[A-Z]+/ | word\nword: start",
            'root ::= root "a"',
            "start: [",
            'start: /a+/ "ab"',
            'start: /[a-z ]{80}/ /a+/ "ab"',
            'start: "A"+ /(A{300}){65536}|x1/',
        ]
    ),
    TEXT | JUNK,
)
_TAGS = st.lists(
    st.fixed_dictionaries(
        {"begin": st.sampled_from(["<a=1>", "<a=2>"]), "end": mostly(st.sampled_from(["</a>", ""]), JUNK)},
        optional={
            "schema": GRAMMAR_SCHEMA,
            "content": mostly(
                st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": GRAMMAR_SCHEMA})
                | st.sampled_from([{"type": "any_text"}, {"type": "const_string", "value": "AA"}]),
                JUNK,
            ),
        },
    ),
    min_size=1,
    max_size=3,
)
_TRIGGERS = mostly(st.sampled_from([["<a="], ["<a=1", "<a=2"], ["A", "<a="]]), st.just(["<", "<a"]) | JUNK)
STRUCTURAL_TAG = st.one_of(
    st.fixed_dictionaries({"type": st.just("structural_tag"), "structures": _TAGS, "triggers": _TRIGGERS}),
    st.fixed_dictionaries(
        {
            "type": st.just("structural_tag"),
            "format": mostly(
                st.fixed_dictionaries(
                    {"type": st.just("triggered_tags"), "triggers": _TRIGGERS, "tags": _TAGS},
                    optional={"at_least_one": st.booleans(), "stop_after_first": st.booleans()},
                )
                | st.fixed_dictionaries(
                    {"type": st.just("tags_with_separator"), "tags": _TAGS, "separator": st.just(",")}
                ),
                st.fixed_dictionaries({"type": st.sampled_from(["dispatch", "sequence", "or"]), "elements": _TAGS})
                | JUNK,
            ),
        }
    ),
)
CHAT_FORMAT = st.one_of(
    STRUCTURAL_TAG,
    st.just({"type": "json_object"}),
    st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": mostly(
                st.fixed_dictionaries({"name": NAME, "schema": GRAMMAR_SCHEMA}, optional={"strict": st.booleans()}),
                JUNK,
            ),
        }
    ),
    st.fixed_dictionaries({"type": mostly(st.just("text"), JUNK)}),
)
FLAT_FORMAT = mostly(
    st.fixed_dictionaries({"type": st.just("json_schema"), "schema": GRAMMAR_SCHEMA, "name": NAME}),
    st.sampled_from([{"type": "json_object"}, {"type": "json_schema", "schema": {}}, {"type": "text"}]),
)
_GUIDED: Mapping[str, Strategy[Any]] = {
    "json": GRAMMAR_SCHEMA | GRAMMAR_SCHEMA.map(json.dumps),
    "regex": PATTERN,
    "choice": OPTIONS,
    "grammar": SOURCE,
}
_STRUCTURED = {**_GUIDED, "structural_tag": STRUCTURAL_TAG | STRUCTURAL_TAG.map(json.dumps)}
STRUCTURED = mostly(
    st.one_of(
        st.just({"json_object": True}), *(st.fixed_dictionaries({name: value}) for name, value in _STRUCTURED.items())
    ),
    st.fixed_dictionaries({}, optional={**_STRUCTURED, "whitespace_pattern": JUNK}),
)
_OPENAI_GRAMMARS: Mapping[str, Strategy[Any]] = {
    "response_format": CHAT_FORMAT,
    "structured_outputs": STRUCTURED,
    **{f"guided_{name}": value for name, value in _GUIDED.items()},
}
GRAMMARS: Mapping[str, Mapping[str, Strategy[Any]]] = {
    COMPLETIONS: _OPENAI_GRAMMARS,
    CHAT: _OPENAI_GRAMMARS,
    RESPONSES: {"text": st.fixed_dictionaries({"format": FLAT_FORMAT})},
    MESSAGES: {
        "output_format": FLAT_FORMAT,
        "output_config": st.fixed_dictionaries({"format": FLAT_FORMAT}),
    },
}
"""What the output of a request may have to look like, by endpoint. A quarter of the bodies has one of these."""
