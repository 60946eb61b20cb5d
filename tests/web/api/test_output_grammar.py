"""The fields that say what an output must look like: the grammar that the tokenizer gets, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from quipu.actors.grammars.structural_tags import structural_tag_rules
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.web.api.body_shapes import MAX_STRUCTURED_CHOICES
from quipu.web.api.output_grammar import ANY_OBJECT, MAX_GRAMMAR_CHARS, MAX_GRAMMAR_DEPTH
from tests.web.asked import ask, refused

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
SOURCE = orjson.dumps(SCHEMA).decode()
NAMED = {"name": "size", "schema": SCHEMA, "strict": True, "description": "How large."}
OLDER_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
    "triggers": ["<function="],
}
NEWER_TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
}
MESSAGE = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": MESSAGE},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": MESSAGE, "max_tokens": 4},
}


def body(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **BODIES[path], **fields}


def lark_of(tag: dict[str, Any], param: str) -> str:
    return "".join(structural_tag_rules(tag, param))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


OPENAI: list[tuple[dict[str, Any], GrammarKind, str, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ANY_OBJECT, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        GrammarKind.JSON_SCHEMA,
        SOURCE,
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SOURCE, "structured_outputs.json"),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        GrammarKind.JSON_OBJECT,
        ANY_OBJECT,
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", '"']}}, GrammarKind.CHOICE, r'["a","\""]', "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"', "structured_outputs.grammar"),
    ({"response_format": OLDER_TAG}, GrammarKind.LARK, lark_of(OLDER_TAG, "response_format"), "response_format"),
    ({"response_format": NEWER_TAG}, GrammarKind.LARK, lark_of(NEWER_TAG, "response_format"), "response_format"),
    (
        {"structured_outputs": {"structural_tag": json.dumps(OLDER_TAG)}},
        GrammarKind.LARK,
        lark_of(OLDER_TAG, "structured_outputs.structural_tag"),
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SOURCE, "guided_json"),
    ({"guided_json": {}}, GrammarKind.JSON_SCHEMA, "{}", "guided_json"),
    ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+", "guided_regex"),
    ({"guided_choice": ["a"]}, GrammarKind.CHOICE, '["a"]', "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"', "guided_grammar"),
    ({"grammar": 'root ::= "a"'}, GrammarKind.LARK, 'root ::= "a"', "grammar"),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        GrammarKind.JSON_SCHEMA,
        SOURCE,
        "response_format.schema",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        GrammarKind.JSON_OBJECT,
        ANY_OBJECT,
        "response_format.type",
    ),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "kind", "source", "param"), OPENAI)
async def test_openai_fields(path: str, fields: dict[str, Any], kind: GrammarKind, source: str, param: str) -> None:
    """Each of OpenAI's and vLLM's fields becomes the request's grammar, and none of them is reported as ignored."""
    asked = await ask(path, body(path, **fields))
    assert asked.encode.grammar == GrammarSpec(kind, source, param)
    assert asked.ignored is None


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"), [case for case in OPENAI if "structured_outputs" in case[0]]
)
async def test_structured_responses(fields: dict[str, Any], kind: GrammarKind, source: str, param: str) -> None:
    """Responses read vLLM's field, too, for what OpenAI's formats cannot say."""
    asked = await ask(RESPONSES, body(RESPONSES, **fields))
    assert asked.encode.grammar == GrammarSpec(kind, source, param)
    assert asked.ignored is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, "text.format.schema"),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format.schema"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format.schema",
        ),
    ],
)
async def test_flat_formats(path: str, fields: dict[str, Any], param: str) -> None:
    """Responses and Messages have the schema in the format itself."""
    asked = await ask(path, body(path, **fields))
    assert asked.encode.grammar == GrammarSpec(GrammarKind.JSON_SCHEMA, SOURCE, param)
    assert asked.ignored is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "text"}, "structured_outputs": None}),
        (CHAT, {"guided_json": None}),
        (CHAT, {"grammar": ""}),
        (RESPONSES, {"text": {"format": {"type": "text"}}}),
        (RESPONSES, {"text": {}}),
        (MESSAGES, {"output_config": {"format": None}, "output_format": None}),
    ],
)
async def test_text_has_no_grammar(path: str, fields: dict[str, Any]) -> None:
    """A request for text has no grammar."""
    assert (await ask(path, body(path, **fields))).encode.grammar is None


@pytest.mark.parametrize(
    "form", [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "size", "schema": SCHEMA}]
)
async def test_response_repeats_its_format(form: dict[str, Any]) -> None:
    """A response object repeats the format that was asked for."""
    answer = (await ask(RESPONSES, body(RESPONSES, text={"format": form}))).answer
    assert answer["text"] == {"format": form}


FORMAT = {"response_format": {"type": "json_object"}}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": "text"}, "response_format", "an object"),
    (CHAT, {"response_format": {}}, "response_format.type", "required"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "`json_schema` or `structural_tag`"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type", "`text`, `json_object` or `json_schema`"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format", "must have either `format`"),
    (
        CHAT,
        {"response_format": {**NEWER_TAG, "format": {"type": "dispatch"}}},
        "response_format.format.type",
        "`dispatch` is not supported",
    ),
    (CHAT, {"response_format": {**OLDER_TAG, "x": nested(64)}}, "response_format", "nested at most"),
    (
        CHAT,
        {"structured_outputs": {"structural_tag": {**OLDER_TAG, "structures": OLDER_TAG["structures"] * 1_500}}},
        "structured_outputs.structural_tag",
        "the grammar made of it",
    ),
    (RESPONSES, {"text": {"format": NEWER_TAG}}, "text.format.type", "`structural_tag` is not"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": 1}}},
        "response_format.json_schema.strict",
        "a boolean",
    ),
    (CHAT, {**FORMAT, "guided_regex": "a"}, "guided_regex", "not allowed together with `response_format.type`"),
    (CHAT, {**FORMAT, "grammar": 'root ::= "a"'}, "grammar", "not allowed together with `response_format.type`"),
    (CHAT, {"grammar": 5}, "grammar", "a string"),
    (RESPONSES, {"grammar": 'root ::= "a"'}, "grammar", "not supported"),
    (MESSAGES, {"grammar": 'root ::= "a"'}, "grammar", "not a parameter of this endpoint"),
    (CHAT, {"response_format": {"type": "json_object", "schema": []}}, "response_format.schema", "an object"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "must have one of"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "together with"),
    (CHAT, {"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs.regex", "together"),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "must have either"),
    (CHAT, {"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag", "a structural tag"),
    (CHAT, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.wh", "not supported"),
    (CHAT, {"guided_json": "{"}, "guided_json", "not valid JSON"),
    (CHAT, {"guided_json": "[]"}, "guided_json", "a JSON schema"),
    (CHAT, {"guided_choice": "a"}, "guided_choice", "a list of strings"),
    (CHAT, {"guided_choice": []}, "guided_choice", "between 1 and"),
    (CHAT, {"guided_choice": ["a", 1]}, "guided_choice", "a list of strings"),
    (CHAT, {"guided_choice": ["a"] * (MAX_STRUCTURED_CHOICES + 1)}, "guided_choice", "between 1 and"),
    (CHAT, {"guided_regex": ""}, "guided_regex", "between 1 and"),
    (CHAT, {"guided_grammar": 5}, "guided_grammar", "a string"),
    (CHAT, {"guided_grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "guided_grammar", "between 1 and"),
    (CHAT, {"guided_json": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}, "guided_json", "characters"),
    (CHAT, {"guided_json": nested(MAX_GRAMMAR_DEPTH)}, "guided_json", "nested at most"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
    (RESPONSES, {"guided_regex": "a"}, "guided_regex", "not supported"),
    (
        RESPONSES,
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs.regex",
        "together with `text.format.type`",
    ),
    (MESSAGES, {"output_format": {"type": "json_object"}}, "output_format.type", "must be `json_schema`"),
    (
        MESSAGES,
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_config.format.schema",
        "together with `output_format.schema`",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param", "message"), REFUSED)
async def test_refused(path: str, fields: dict[str, Any], param: str, message: str) -> None:
    """What has no meaning, is too large, or contradicts another field is refused by name."""
    named, told = await refused(path, body(path, **fields))
    assert param in told and message in told
    assert path == MESSAGES or (named is not None and named.startswith(param))
