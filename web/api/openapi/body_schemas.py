"""JSON schemas of declared fields and shapes.

In a request every field that is not required may be absent or null, and other fields are ignored. What must always
hold: a schema forbids nothing that the readers accept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quipu.actors.config.declarations import Bounds
from quipu.actors.messages.sampling import SAMPLING_FIELDS

from ..body_field import ARRAY, INTEGER, OBJECT, STRING, BodyField, Kind, Schema, Shape
from ..body_table import FIELDS, NAMES
from ..operation import Named
from ..sampling_schemas import limits, or_null, sampling_schema

IGNORED = "x-ignored-fields"
"""Fields of an object's API that have no effect, whatever they are."""
REFUSED = "x-refused-fields"
"""Fields of a body that are refused, with the values that are accepted all the same."""
_ENDPOINTS: Mapping[str, str] = {name: endpoint for endpoint, name in NAMES.items()}
_NULL: Schema = {"type": "null"}
_REF = "#/components/schemas/"


class Schemas:
    """The schemas that have a name, filled while others refer to them."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}

    def of(self, part: Any) -> Any:
        """Return a schema as JSON, with references for what has a name."""
        if isinstance(part, Shape):
            return self._refer(part.name, part, self._shape) if part.name else self._shape(part)
        if isinstance(part, Named):
            return self._refer(part.name, part.schema, self.of)
        if isinstance(part, Mapping):
            return {name: self.of(inner) for name, inner in part.items()}
        if isinstance(part, list | tuple):
            return [self.of(inner) for inner in part]
        return part

    def _refer(self, name: str, part: Any, make: Any) -> Any:
        if name not in self.named:
            self.named[name] = {}  # it may refer to itself
            self.named[name] = make(part)
        return {"$ref": _REF + name}

    def _shape(self, shape: Shape) -> Any:
        if (endpoint := _ENDPOINTS.get(shape.name)) is not None:
            return {**self._body(endpoint), IGNORED: list(shape.ignored)}
        closed: dict[str, Any] = {"additionalProperties": False} if shape.is_closed else {}
        known = {shape.tag, *(field.name for kind in shape.kinds for field in kind.fields)}
        names = [*shape.ignored, *(name for name in shape.by_name if shape.kinds and name not in known)]
        ignored = {IGNORED: names} if names else {}
        if not shape.kinds:
            read = [field for field in shape.fields if not field.refusals]
            refused = {field.name: list(_neutral(field)) for field in shape.fields if field.refusals}
            return {**self.object(read), **closed, **ignored, **({REFUSED: refused} if refused else {})}
        kinds = [{**self._kind(shape.by_name[shape.tag], kind), **closed} for kind in shape.kinds]
        return {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}), **ignored}

    def _body(self, endpoint: str) -> Any:
        """Return the schema of a generation request: what the endpoint reads, and the names of what it refuses."""
        read = [field for field in FIELDS if endpoint in field.apis]
        schema = self.object(sorted(read, key=lambda field: (not field.is_required, field.name)))
        sampling = {
            field.name: sampling_schema(field.on(endpoint)) for field in SAMPLING_FIELDS if endpoint in field.apis
        }
        refused = {
            **{field.name: list(field.refusals[endpoint].neutral) for field in FIELDS if endpoint in field.refusals},
            **{field.name: list(field.off) for field in SAMPLING_FIELDS if endpoint not in field.apis},
        }
        return {**schema, "properties": {**schema["properties"], **sampling}, REFUSED: refused}

    def _kind(self, tag: BodyField, kind: Kind) -> Any:
        values: list[Any] = [{"enum": list(kind.values)}] if kind.values else []
        if kind.pattern:
            values.append({"type": STRING, "pattern": kind.pattern})
        if kind.is_default:
            values.append(_NULL)
        told = self.object(kind.fields)
        schema = values[0] if len(values) == 1 else {"anyOf": values}
        required = told.get("required", []) if kind.is_default else [tag.name, *told.get("required", [])]
        return {
            "type": OBJECT,
            "properties": {tag.name: schema, **told["properties"]},
            **({"required": required} if required else {}),
        }

    def object(self, fields: Iterable[BodyField]) -> Any:
        """Return the schema of an object in a request."""
        fields = tuple(fields)
        required = [field.name for field in fields if field.is_required]
        properties = {field.name: self.field(field) for field in fields}
        return {"type": OBJECT, "properties": properties, **({"required": required} if required else {})}

    def field(self, field: BodyField) -> Any:
        """Return the schema of a field's value."""
        schema = self._value(field)
        if field.also:
            schema = {"anyOf": [{"const": value} for value in field.also] + [schema]}
        if not field.is_required and schema:
            schema = or_null(schema)
        told = {} if field.default in (None, "") else {"default": field.default}
        return {**schema, **told, **({"description": field.help} if field.help else {})}

    def _value(self, field: BodyField) -> Any:
        if field.schema is not None:
            return self.of(field.schema)
        if field.choices:
            return {"type": STRING, "enum": list(field.choices)}
        if field.inner is not None:
            return self.of(field.inner)
        if field.items is not None:
            listed = {"type": ARRAY, "items": self.of(field.items)}
            if field.min_items:
                listed["minItems"] = field.min_items
            return {"anyOf": [{"type": STRING}, listed]} if field.type == STRING else listed
        if field.type:
            return {"type": field.type, **limits(field.bounds)}
        if field.max_length is not None:
            return {"type": STRING, "maxLength": field.max_length}
        if field.bounds != Bounds() or type(field.default) is int:
            return {"type": INTEGER, **limits(field.bounds)}
        return {"type": "boolean"} if type(field.default) is bool else {}


def _neutral(field: BodyField) -> tuple[object, ...]:
    """Return what is accepted of a field that every endpoint with the same body refuses."""
    return next(iter(field.refusals.values())).neutral
