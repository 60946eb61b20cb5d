"""The OpenAPI 3.1 document of an app: a path for each of its routes, and the schemas of bodies, answers and errors.

Read from the URL map and from what `operation.py` declares of each route; who may use one is asked of
`web/auth/auth.py`. What must always hold: every route of the app is here (the tests compare them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import attrs
from quart_trio import QuartTrio

import quipu

from ...auth.auth import OPEN_ROUTES, needs_admin
from ...request.errors import is_anthropic_path, is_shared_path
from ..operation import (
    BATCHES,
    CACHE,
    EVENTS,
    GENERATION,
    JSON,
    MODELS,
    OPERATORS,
    PAGES,
    POOLING,
    STORED,
    USAGE,
    Operation,
    operations_of,
)
from .body_schemas import Schemas
from .error_schemas import ANTHROPIC_ERROR, OPENAI_ERROR

VERSION: Final = "3.1.0"
TAGS: Final[Mapping[str, str]] = {
    GENERATION: "Completions, chats, responses and messages, and how many tokens they have.",
    POOLING: "Vectors and scores of texts, on servers with such a model.",
    STORED: "Responses, conversations and chat completions that the server keeps, with `--response-store`.",
    MODELS: "What is served.",
    CACHE: "The prefix cache: what it holds, and why a prompt missed it.",
    USAGE: "What was used, by tenant, key and model.",
    BATCHES: "Files of requests that run below every other request.",
    OPERATORS: "Health, metrics and engines.",
    PAGES: "Pages for browsers.",
}
_ABOUT: Final = (
    "An LLM inference server with the APIs of OpenAI and Anthropic. Fields of a request that are not listed here are "
    "ignored, and named in the response header `X-Quipu-Ignored-Fields`, or refused if they would change the answer. "
    "Null means absent. A server without keys answers routes that change it or show records only to "
    "its own machine, unless it is started with `--open-admin`, and all others to anybody."
)
_SCHEMES: Final[Mapping[str, Any]] = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "apiKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "An API key, as Anthropic's clients send it.",
    },
    "adminKey": {"type": "http", "scheme": "bearer", "description": "A key with the right to administer the server."},
    "adminKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "A key with the right to administer the server.",
    },
}
EVENT_DATA: Final = "x-event-data"
"""What the data of a stream's events are."""
_PART = re.compile(r"<(?:[a-z]+:)?([a-z_]+)>")


def make_document(app: QuartTrio) -> dict[str, Any]:
    """Return the document."""
    declared, schemas = operations_of(app), Schemas()
    paths: dict[str, Any] = {}
    for method, rule in sorted(declared, key=lambda one: (one[1], one[0])):
        described = _Writer(schemas, method, rule, declared[method, rule]).operation()
        paths.setdefault(path_of(rule), {})[method.lower()] = described
    return {
        "openapi": VERSION,
        "info": {"title": "quipu", "version": quipu.__version__, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {"schemas": schemas.named, "securitySchemes": dict(_SCHEMES)},
    }


def path_of(rule: str) -> str:
    """Return a rule of the URL map as OpenAPI writes it."""
    return _PART.sub(r"{\1}", rule)


@attrs.frozen
class _Writer:
    """Writes one operation."""

    schemas: Schemas
    method: str
    rule: str
    declared: Operation

    def operation(self) -> dict[str, Any]:
        declared = self.declared
        described: dict[str, Any] = {
            "operationId": self._id(),
            "tags": [declared.tag],
            "summary": declared.summary,
        }
        if declared.help:
            described["description"] = declared.help
        if parameters := [*self._path_parameters(), *self._query_parameters()]:
            described["parameters"] = parameters
        if declared.body is not None:
            schema = self.schemas.of(declared.body)
            described["requestBody"] = {
                "required": not declared.body_may_be_empty,
                "content": {JSON: {"schema": schema}},
            }
        described["responses"] = dict(self._responses())
        described["security"] = self._security()
        return described

    def _id(self) -> str:
        index = "index" if self.rule.endswith("/") else ""
        return re.sub(r"[^a-z0-9]+", "_", f"{self.method} {self.rule}{index}".lower()).strip("_")

    def _path_parameters(self) -> Iterator[dict[str, Any]]:
        for name in _PART.findall(self.rule):
            yield {
                "name": name,
                "in": "path",
                "required": True,
                "description": self.declared.path[name],
                "schema": {"type": "string", "minLength": 1},
            }

    def _query_parameters(self) -> Iterator[dict[str, Any]]:
        for field in self.declared.query:
            schema = self.schemas.field(attrs.evolve(field, is_required=True, help=""))
            told = {"description": field.help} if field.help else {}
            yield {"name": field.name, "in": "query", "required": field.is_required, **told, "schema": schema}

    def _responses(self) -> Iterator[tuple[str, Any]]:
        declared = self.declared
        content: dict[str, Any] = {}
        if declared.content_type != JSON:
            content[declared.content_type] = {"schema": {"type": "string"}}
        else:
            content[JSON] = {"schema": {} if declared.answer is None else self.schemas.of(declared.answer)}
        if declared.other_type is not None:
            content[declared.other_type] = {"schema": {"type": "string"}}
        if declared.events is not None:
            events = self.schemas.of(declared.events)
            content[EVENTS] = {"schema": {"type": "string"}, EVENT_DATA: events}
        yield str(declared.status.value), {"description": declared.status.phrase, "content": content}
        for status, when in declared.others.items():
            yield str(status.value), {"description": when, **self._error_content(status)}
        yield "default", {"description": "The request failed.", **self._error_content(None)}

    def _error_content(self, status: HTTPStatus | None) -> dict[str, Any]:
        if status is not None and status < HTTPStatus.BAD_REQUEST:
            return {}
        path = path_of(self.rule)
        if is_shared_path(path):
            shape: Any = {"anyOf": [OPENAI_ERROR, ANTHROPIC_ERROR]}
        else:
            shape = ANTHROPIC_ERROR if is_anthropic_path(path) else OPENAI_ERROR
        return {"content": {JSON: {"schema": self.schemas.of(shape)}}}

    def _security(self) -> list[dict[str, list[str]]]:
        if self.rule in OPEN_ROUTES:
            return []
        kind = "adminKey" if needs_admin(self.rule) else "apiKey"
        return [{kind: []}, {f"{kind}Header": []}]
