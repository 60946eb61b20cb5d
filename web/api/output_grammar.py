"""The fields by which a client says what its output must look like, as grammars.

Only their shape is checked here; the tokenizer compiles the grammar, and names the field if that fails. What must
always hold: a grammar is bounded in bytes and in depth before it is written as text, and a request has at most one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from quipu.actors.config.runtime_config import MAX_GRAMMAR_BYTES
from quipu.actors.grammars.structural_tags import structural_tag_rules
from quipu.actors.grammars.text_values import UnsupportedSchema
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec

from ..request.errors import APIError, bad_value, unsupported_parameter, unsupported_value
from .body_shapes import MAX_STRUCTURED_CHOICES
from .fields import Fields, wrong_type
from .json_body import parse_json
from .json_structure import InvalidJson, TooComplex
from .pace import Pace

MAX_GRAMMAR_CHARS = MAX_GRAMMAR_BYTES
"""Of one grammar and all of its schemas. The tokenizer counts bytes, and may be configured to take fewer."""
MAX_GRAMMAR_DEPTH = 64
ANY_OBJECT = '{"type":"object"}'
_VALUES_AN_ITEM = 16
_CHARS_AN_ITEM, _ITEMS_A_RULE = 1024, 4
_KINDS = {
    "json": GrammarKind.JSON_SCHEMA,
    "json_object": GrammarKind.JSON_OBJECT,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.LARK,
}
"""By the names that vLLM gives them."""
_LEGACY = ("json", "regex", "choice", "grammar")
_TAG = "structural_tag"
_STRUCTURED_UNSUPPORTED = ("disable_additional_properties", "whitespace_pattern")


async def read_openai_grammar(fields: Fields, pace: Pace) -> GrammarSpec | None:
    """Read OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_…`, and llama.cpp's `grammar`.

    Raises APIError.
    """
    specs = [await read_format(fields, "response_format", "json_schema", pace), await read_structured(fields, pace)]
    specs += [await _read_one(fields, f"guided_{name}", _KINDS[name], pace) for name in _LEGACY]
    if fields.get("grammar") != "":  # which llama.cpp takes for none
        specs.append(await _read_one(fields, "grammar", GrammarKind.LARK, pace))
    return only_one(specs)


async def read_format(fields: Fields, name: str, nested: str | None, pace: Pace) -> GrammarSpec | None:
    """Read a format with a type. `nested`: the field in which the schema's object is; None: in the format itself.

    Raises APIError.
    """
    if fields.get(name) is None:
        return None
    form = fields.fields(name)
    match form.text("type"):
        case "text":
            return None
        case "json_object":
            if form.get("schema") not in (None, {}):  # of llama.cpp, Together and others
                form.fields("schema")
                return await _read_schema(form, pace)
            return GrammarSpec(GrammarKind.JSON_OBJECT, ANY_OBJECT, form.param("type"))
        case "json_schema":
            form = form if nested is None else form.required_fields(nested)
            form.text("name")
            form.flag("strict")  # the output matches the schema, strict or not
            form.optional_text("description")
            return await _read_schema(form, pace)
        case "structural_tag" if nested is not None:
            return await _read_structural_tag(fields.get(name), fields.param(name), pace)
        case "structural_tag" | "grammar" | "regex" as kind:
            raise unsupported_value(form.param("type"), f"`{kind}` is not supported by this server")
        case _ if nested is None:
            raise bad_value(form.param("type"), "must be `text`, `json_object` or `json_schema`")
        case _:
            raise bad_value(form.param("type"), "must be `text`, `json_object`, `json_schema` or `structural_tag`")


async def join_rules(rules: Iterator[str], too_long: APIError, pace: Pace) -> str:
    """Return the rules of a grammar as text, made with checkpoints. Raises APIError, `too_long` among them."""
    parts, num_chars = [], 0
    try:
        for rule in rules:
            parts.append(rule)
            num_chars += len(rule)
            if num_chars > MAX_GRAMMAR_CHARS:
                raise too_long
            await pace.tick(_ITEMS_A_RULE + len(rule) // _CHARS_AN_ITEM)
    except UnsupportedSchema as error:
        raise unsupported_value(error.param, error.problem) from None
    return "".join(parts)


async def read_schema_format(fields: Fields, name: str, pace: Pace) -> GrammarSpec | None:
    """Read Anthropic's form of a format, which has a schema alone. Raises APIError."""
    if not fields.get(name):
        return None
    form = fields.fields(name)
    if form.text("type") != "json_schema":
        raise bad_value(form.param("type"), "must be `json_schema`")
    return await _read_schema(form, pace)


def only_one(specs: Sequence[GrammarSpec | None]) -> GrammarSpec | None:
    """Return the request's grammar. Raises APIError if there are two."""
    found = [spec for spec in specs if spec is not None]
    if len(found) > 1:
        raise both(found[1].param, found[0].param)
    return found[0] if found else None


def both(param: str, other: str) -> APIError:
    """Return the error for two fields that contradict each other."""
    return bad_value(param, f"not allowed together with `{other}`")


async def _as_json(value: Any, param: str, pace: Pace) -> str:
    await check_size(value, param, pace)
    return orjson.dumps(value).decode()


async def check_size(value: Any, param: str, pace: Pace) -> None:
    """Raise APIError if a part of the body is too large or too deep to be written as JSON at once."""
    await pace.tick()
    num_chars = num_items = depth = 0
    level = [value]
    while level:
        inner: list[Any] = []
        depth += 1
        for item in level:
            num_chars += 1 + (len(item) if type(item) in (str, dict, list) else 0)
            if num_chars > MAX_GRAMMAR_CHARS:
                raise bad_value(param, f"must have at most {MAX_GRAMMAR_CHARS} characters", "too_many_items")
            if type(item) is dict:
                inner += [*item, *item.values()]
            elif type(item) is list:
                inner += item
            num_items += 1
            if num_items % _VALUES_AN_ITEM == 0:
                await pace.tick()
        if depth > MAX_GRAMMAR_DEPTH:
            raise bad_value(param, f"must be nested at most {MAX_GRAMMAR_DEPTH} deep", "too_many_items")
        level = inner


async def _read_schema(form: Fields, pace: Pace) -> GrammarSpec:
    return await _schema_spec(form.required_fields("schema").values, form.param("schema"), pace)


async def _schema_spec(schema: dict[str, Any], param: str, pace: Pace) -> GrammarSpec:
    await pace.schema(schema, f"{param}.properties")
    return GrammarSpec(GrammarKind.JSON_SCHEMA, await _as_json(schema, param, pace), param)


async def read_structured(body: Fields, pace: Pace) -> GrammarSpec | None:
    """Read vLLM's `structured_outputs`. Raises APIError."""
    name = "structured_outputs"
    if body.get(name) is None:
        return None
    fields = body.fields(name)
    for inner in _STRUCTURED_UNSUPPORTED:
        if fields.get(inner):
            raise unsupported_parameter(fields.param(inner))
    specs = [await _read_one(fields, inner, kind, pace) for inner, kind in _KINDS.items()]
    if (tag := fields.get(_TAG)) is not None:
        specs.append(await _read_structural_tag(tag, fields.param(_TAG), pace))
    spec = only_one(specs)
    if spec is None:
        raise bad_value(body.param(name), f"must have one of {', '.join((*_KINDS, _TAG))}")
    return spec


async def _read_structural_tag(value: Any, param: str, pace: Pace) -> GrammarSpec:
    tag = await _parsed(value, param, pace) if type(value) is str else value
    if type(tag) is not dict:
        raise wrong_type(param, "a structural tag, as an object or as text")
    await check_size(tag, param, pace)
    too_long = bad_value(param, f"the grammar made of it has more than {MAX_GRAMMAR_CHARS} characters")
    rules = await join_rules(structural_tag_rules(tag, param), too_long, pace)
    return GrammarSpec(GrammarKind.LARK, rules, param)


async def _read_one(fields: Fields, name: str, kind: GrammarKind, pace: Pace) -> GrammarSpec | None:
    value, param = fields.get(name), fields.param(name)
    if value is None:
        return None
    match kind:
        case GrammarKind.JSON_OBJECT:
            return GrammarSpec(kind, ANY_OBJECT, param) if fields.flag(name) else None
        case GrammarKind.JSON_SCHEMA:
            schema = await _parsed(value, param, pace) if type(value) is str else value
            if type(schema) is not dict:
                raise wrong_type(param, "a JSON schema, as an object or as text")
            return await _schema_spec(schema, param, pace)
        case GrammarKind.CHOICE:
            return GrammarSpec(kind, await _choices(value, param, pace), param)
    return GrammarSpec(kind, _source(value, param), param)


def _source(value: Any, param: str) -> str:
    if type(value) is not str:
        raise wrong_type(param, "a string")
    if not 0 < len(value) <= MAX_GRAMMAR_CHARS:
        raise bad_value(param, f"must have between 1 and {MAX_GRAMMAR_CHARS} characters")
    return value


async def _choices(value: Any, param: str, pace: Pace) -> str:
    if type(value) is not list or any(type(choice) is not str for choice in value[:MAX_STRUCTURED_CHOICES]):
        raise wrong_type(param, "a list of strings")
    if not 0 < len(value) <= MAX_STRUCTURED_CHOICES:
        raise bad_value(param, f"must have between 1 and {MAX_STRUCTURED_CHOICES} strings")
    return await _as_json(value, param, pace)


async def _parsed(text: str, param: str, pace: Pace) -> Any:
    _source(text, param)
    pace.check_json_text(text, param)
    pace.rest()
    try:
        return await parse_json(text.encode())
    except (InvalidJson, TooComplex) as error:
        raise bad_value(param, f"not valid JSON: {error}", "invalid_json") from None
