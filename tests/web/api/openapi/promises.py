"""What the OpenAPI document promises of a request and of its answer, as validators.

`Promises` says whether the document allows a request, and what of an answer it does not describe: a status, a field, a
type, the events of a stream. Answers are compared strictly: a field that the document does not know is an error, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

import attrs
import jsonschema_rs

JSON, EVENTS = "application/json", "text/event-stream"
_WHOLE = re.compile(r"-?[0-9]{1,15}")
_INDEXED = re.compile(r"(.+)\[[0-9]*\]")
_FLAGS = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}


@attrs.frozen
class Answer:
    status: int
    content_type: str
    body: bytes


def strict(schema: Any) -> Any:
    """Return a schema whose objects have no fields but those that it names."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(value) for name, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **inner} if is_object and schema["properties"] else inner


class Promises:
    def __init__(self, document: Any) -> None:
        self.document = document
        self._strict = strict(document["components"])
        self._validators: dict[str, Any] = {}

    def operation(self, method: str, path: str) -> Any:
        return self.document["paths"][path][method.lower()]

    def allows(self, method: str, path: str, query: str, body: bytes) -> bool:
        """Return whether the document allows a request to a path of it."""
        operation = self.operation(method, path)
        return self._allows_query(operation, query) and self._allows_body(operation, body)

    def _allows_body(self, operation: Any, data: bytes) -> bool:
        declared = operation.get("requestBody")
        if declared is None:
            return True
        if not data:
            return not declared["required"]
        try:
            value = json.loads(data)
        except ValueError:
            return False
        return bool(self._validator(declared["content"][JSON]["schema"], self.document["components"]).is_valid(value))

    def _allows_query(self, operation: Any, query: str) -> bool:
        given: dict[str, list[str]] = {}
        for name, values in parse_qs(query, keep_blank_values=True).items():
            indexed = _INDEXED.fullmatch(name)
            given.setdefault(indexed[1] if indexed else name, []).extend(values)
        for parameter in operation.get("parameters", ()):
            if parameter["in"] != "query":
                continue
            values = given.get(parameter["name"], [])
            is_list = parameter["schema"].get("type") == "array"
            if not values or (values == [""] and not is_list):
                if parameter["required"]:
                    return False
                continue
            if not parameter["schema"]:
                continue
            value: Any = list(dict.fromkeys(values))  # repeated values count once
            if not is_list:
                if len(values) > 1:
                    return False
                value = _read(values[0], parameter["schema"])
            if not self._validator(parameter["schema"], self.document["components"]).is_valid(value):
                return False
        return True

    def broken_by(self, method: str, path: str, answer: Answer) -> Iterator[str]:
        """Yield how an answer differs from what the document says."""
        responses = self.operation(method, path)["responses"]
        declared = responses.get(str(answer.status), responses["default"] if answer.status >= 400 else None)
        if declared is None:
            yield f"status {answer.status} is not described"
            return
        content = declared.get("content")
        if content is None or not answer.body:
            return
        kind = answer.content_type.partition(";")[0]
        found = next((media for name, media in content.items() if name.partition(";")[0] == kind), None)
        if found is None:
            yield f"{answer.status}: content type {kind} is not described"
        elif kind == EVENTS:
            for data in events_of(answer.body):
                yield from self._errors(found["x-event-data"], data)
        elif kind == JSON:
            yield from self._errors(found["schema"], json.loads(answer.body))

    def _errors(self, schema: Any, value: Any) -> Iterator[str]:
        validator = self._validator(strict(schema), self._strict)
        for error in validator.iter_errors(value):
            yield f"{'.'.join(map(str, error.instance_path))}: {str(error).splitlines()[0][:300]}"

    def _validator(self, schema: Any, components: Any) -> Any:
        key = json.dumps(schema) + str(id(components))
        if key not in self._validators:
            whole = {**schema, "components": components}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
        return self._validators[key]


def _read(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a query parameter's value as its schema has it, or as text."""
    match schema.get("type"):
        case "integer" if _WHOLE.fullmatch(text):
            return int(text)
        case "boolean":
            return _FLAGS.get(text, text)
    return text


def events_of(body: bytes) -> Iterator[Any]:
    """Yield the data of a stream's events, `[DONE]` apart."""
    for line in body.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
