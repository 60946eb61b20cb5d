"""JSON schemas of sampling fields, by their declarations in `actors/messages/sampling.py`."""

from __future__ import annotations

from typing import Any

from quipu.actors.config.declarations import Bounds, SamplingField

from .body_field import ARRAY, INTEGER, NUMBER, OBJECT, STRING, Schema
from .sampling import MAX_WORD_CHARS, TOKEN_ID

_NULL: Schema = {"type": "null"}


def or_null(schema: Any) -> Any:
    """Return a schema that also allows null."""
    if type(kind := schema.get("type")) is str and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    if type(kind) is str:
        return {**schema, "type": [kind, "null"], "enum": [*schema["enum"], None]}
    if set(schema) == {"anyOf"}:
        return {"anyOf": [*schema["anyOf"], _NULL]}
    return {"anyOf": [schema, _NULL]}


def limits(bounds: Bounds) -> dict[str, float]:
    """Return the keywords for the bounds of a number."""
    named = {"minimum": bounds.minimum, "exclusiveMinimum": bounds.above, "maximum": bounds.maximum}
    return {keyword: limit for keyword, limit in named.items() if limit is not None}


def sampling_schema(field: SamplingField) -> Any:
    """Return the schema of a sampling field's value."""
    has_default = isinstance(field.default, int | float) and field.reader != "seed"
    told: dict[str, Any] = {"default": field.default} if has_default else {}
    note = "; a checkpoint may suggest another default" if field.from_checkpoint else ""
    return {**or_null(sampling_value(field)), **told, "description": f"{field.help}{note}"}


def sampling_value(field: SamplingField) -> dict[str, Any]:
    """Return the schema of a sampling field's value, which is not null."""
    token_ids = {"type": ARRAY, "items": {"type": INTEGER, "minimum": 0}}
    most = {} if field.max_length is None else {"maxItems": field.max_length}
    match field.reader:
        case "number":
            return {"type": NUMBER, **limits(field.bounds)}
        case "boolean":
            return {"type": "boolean"}
        case "token_ids":
            return {**token_ids, **most}
        case "some_token_ids":
            return {**token_ids, "minItems": 1, **most}
        case "words":
            word = {"type": STRING, "maxLength": MAX_WORD_CHARS, "pattern": r"\S"}
            return {"type": ARRAY, "items": word, **most}
        case "biases":
            return {
                "type": OBJECT,
                "propertyNames": {"pattern": f"^({TOKEN_ID.pattern})$"},
                "additionalProperties": {"type": NUMBER, **limits(field.bounds)},
                **({} if field.max_length is None else {"maxProperties": field.max_length}),
            }
    return {"type": INTEGER, **limits(field.bounds)}
