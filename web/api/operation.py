"""How a route is declared: its method and path, who reads and writes what, all in one place beside its handler.

    @route(app, "GET /v1/models", Operation(summary="List the models", tag=MODELS, answer=MODEL_LIST))
    async def list_models() -> dict[str, Any]: ...

`openapi/` makes the document at `/openapi.json` of what is declared; who may use a route follows from
`web/auth/auth.py`. What must always hold: every route of the app is declared (`tests/web/api/openapi/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeVar

import attrs
from quart_trio import QuartTrio

from .body_field import BodyField, Schema, Shape

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
EVENTS: Final = "text/event-stream"
GENERATION, STORED, POOLING, BATCHES, MODELS, CACHE, USAGE, OPERATORS, PAGES = (
    "Generation",
    "Stored",
    "Embeddings and scores",
    "Files and batches",
    "Models",
    "Cache",
    "Usage",
    "Operators",
    "Pages",
)
"""Tags, in the order of the document."""
View = TypeVar("View", bound=Callable[..., Any])
_OPERATIONS = "quipu.operations"


@attrs.frozen
class Named:
    """A schema with a name of its own in the document."""

    name: str
    schema: Schema


@attrs.frozen(kw_only=True)
class Operation:
    """What a client sends to a route, and is answered."""

    summary: str
    tag: str
    help: str = ""
    path: Mapping[str, str] = attrs.field(factory=dict)
    """What each part of the path is."""
    query: tuple[BodyField, ...] = ()
    body: Shape | Named | None = None
    body_may_be_empty: bool = False
    answer: Schema | Shape | Named | None = None
    """Of an answer in JSON. None: any."""
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON
    other_type: str | None = None
    """Of an answer in text, where the query asks for it."""
    events: Schema | Named | None = None
    """The data of the events of a stream, if the body may ask for one."""
    others: Mapping[HTTPStatus, str] = attrs.field(factory=dict)
    """Further statuses, and when they come."""


def route(app: QuartTrio, method_and_path: str, operation: Operation) -> Callable[[View], View]:
    """Return a decorator that registers a handler, and what is declared of it."""
    method, _, rule = method_and_path.partition(" ")

    def register(view: View) -> View:
        endpoint = f"{view.__name__} {method_and_path}"
        app.add_url_rule(rule, endpoint, view, methods=[method])
        operations_of(app)[method, rule] = operation
        return view

    return register


def operations_of(app: QuartTrio) -> dict[tuple[str, str], Operation]:
    """Return what is declared, by method and rule of the URL map."""
    found: dict[tuple[str, str], Operation] = app.extensions.setdefault(_OPERATIONS, {})
    return found


# ---------------------------------------------------------------- schemas of answers

TEXT_VALUE: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
WHOLE: Final[Schema] = {"type": "integer"}
NUMBER_VALUE: Final[Schema] = {"type": "number"}
FLAG: Final[Schema] = {"type": "boolean"}
ANY_OBJECT: Final[Schema] = {"type": "object"}
NULL: Final[Schema] = {"type": "null"}
ANYTHING: Final[Schema] = {}

Part = Schema | Named | Shape


def maybe(schema: Part) -> Schema:
    """Return the schema of a value that may be null."""
    if isinstance(schema, Mapping) and type(schema.get("type")) is str:
        values = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
        return {**schema, "type": [schema["type"], "null"], **values}
    return {"anyOf": [schema, NULL]}


def array(items: Part) -> Schema:
    return {"type": "array", "items": items}


def either(*schemas: Part) -> Schema:
    return {"anyOf": list(schemas)}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def always(value: object) -> Schema:
    return {"const": value}


def by_name(values: Part) -> Schema:
    """Return the schema of an object with any names."""
    return {"type": "object", "additionalProperties": values}


def record(fields: Mapping[str, Part], optional: Mapping[str, Part] | None = None) -> Schema:
    """Return the schema of an object that has all of `fields`, and may have those that are `optional`."""
    return {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
    }
