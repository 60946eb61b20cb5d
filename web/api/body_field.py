"""How a field of a request body is declared: its type and bounds, who reads it, and who refuses it.

`body_table.py` declares the fields of bodies, `body_shapes.py` those of the objects within; `Fields` reads by the
declarations, `ignored_fields.py` names what they lack, `python -m scripts.declared_tables` writes them into
`docs/use/fields.md`, and `openapi/` makes JSON schemas of them.

What must always hold: a bound, default or choice that is declared is written down nowhere else; no reader accepts what
the schema of a declaration forbids (`tests/web/api/openapi/`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from quipu.actors.config.declarations import Bounds

BOOLEAN, INTEGER, NUMBER, STRING, OBJECT, ARRAY = "boolean", "integer", "number", "string", "object", "array"
"""The types of JSON."""
Schema = Mapping[str, Any]
"""A JSON schema. A `Shape` in it stands for its own schema."""
OFF: tuple[object, ...] = (False, 0, "", [], {})
"""Values that ask for nothing, in most fields."""


class Why(enum.Enum):
    """Why an endpoint refuses a field that another one reads, or none."""

    UNSUPPORTED = enum.auto()
    """The API has it, or a client may believe so; it would change the answer."""
    UNKNOWN = enum.auto()
    """Only other APIs have it."""
    IN_WORDS = enum.auto()
    """The endpoint's reader explains."""


@attrs.frozen
class Refusal:
    """What an endpoint that does not read a field accepts of it all the same."""

    neutral: tuple[object, ...] = ()
    """Values without an effect. Null always means absent."""
    why: Why = Why.UNSUPPORTED
    instead: str | None = None
    """The endpoint's own field that means the same."""

    def accepts(self, value: Any) -> bool:
        """Return whether a value has no effect."""
        return any(_is_same(value, neutral) for neutral in self.neutral)


def _is_same(value: Any, neutral: object) -> bool:
    if type(neutral) is dict and neutral:  # whatever else the object says
        return type(value) is dict and all(value.get(name) == inner for name, inner in neutral.items())
    # 0 is not false: 0 logprobs are those of the sampled tokens
    return value == neutral and (type(value) is bool) == (type(neutral) is bool)


@attrs.frozen(kw_only=True)
class BodyField:
    """One field of an object in a request."""

    name: str
    apis: tuple[str, ...] = ()
    """The endpoints that read it, where it is a field of a body."""
    refusals: Mapping[str, Refusal] = attrs.field(factory=dict)
    """By endpoint. Where it is neither read nor refused, it is ignored, and named in a header."""
    attribute: str = ""
    """Where `GenerationRequest` has its value, if no endpoint has more to say of it."""
    type: str = ""
    """Of its value; empty: it follows from what else is declared, or any value is accepted."""
    schema: Schema | None = None
    """Of its value, where types, bounds and inner fields do not say it all."""
    also: tuple[object, ...] = ()
    """Values that are accepted besides."""
    is_required: bool = False
    """Whether it may be neither absent nor null."""
    help: str = ""
    """For the documents."""
    bounds: Bounds = attrs.field(factory=Bounds)
    choices: tuple[str, ...] = ()
    max_length: int | None = None
    """Of a text, in characters."""
    default: Any = None
    is_portable: bool = False
    """It means the same to every server with the same API."""
    inner: Shape | None = None
    """The fields of the object that it holds, if they are known."""
    items: Shape | None = None
    """The fields of the objects in the list that it may hold."""
    min_items: int = 0
    """Of that list."""

    def limits(self) -> str:
        """Return what is declared of its values, as documents write it."""
        if self.choices:
            return ", ".join(f"`{choice}`" for choice in self.choices)
        return self.bounds.words() if self.max_length is None else f"at most {self.max_length} characters"


@attrs.frozen
class Kind:
    """One of the objects that a place may hold, told apart by the value of one field."""

    values: tuple[str, ...]
    fields: tuple[BodyField, ...]
    pattern: str = ""
    """Of further values."""
    is_default: bool = False
    """Whether the field may be absent or null."""


@attrs.frozen(slots=False)
class Shape:
    """The fields of one object."""

    fields: tuple[BodyField, ...]
    index: str = "[{}]"
    """Of a body: how an index of a list is written in a path."""
    name: str = ""
    """In the OpenAPI document; empty: its schema stands where it is used."""
    is_closed: bool = False
    """Other fields are refused."""
    ignored: tuple[str, ...] = ()
    """Fields of its API that change no answer here: they are ignored like unknown ones."""
    tag: str = ""
    """The field that says which of `kinds` an object is."""
    kinds: tuple[Kind, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, BodyField]:
        return {field.name: field for field in self.fields}

    @cached_property
    def objects(self) -> Mapping[str, Shape]:
        """Fields that hold an object whose fields are known as well."""
        return {field.name: field.inner for field in self.fields if field.inner is not None}

    @cached_property
    def lists(self) -> Mapping[str, Shape]:
        """Fields that may hold a list of such objects."""
        return {field.name: field.items for field in self.fields if field.items is not None}


ANY = BodyField(name="")
"""A field without bounds."""
NO_SHAPE = Shape(())
"""Of an object whose fields are not declared."""


def shape(*fields: BodyField | str, index: str = "[{}]", name: str = "", ignored: tuple[str, ...] = ()) -> Shape:
    """Return the shape of an object; a name stands for a field with any value."""
    known = tuple(BodyField(name=field) if isinstance(field, str) else field for field in fields)
    return Shape(known, index, name, ignored=ignored)


def kind(values: str, *fields: BodyField | str, pattern: str = "", is_default: bool = False) -> Kind:
    """Return one kind of object; `values` of its tag are separated by spaces."""
    return Kind(tuple(values.split()), shape(*fields).fields, pattern, is_default)


def union(
    tag: BodyField | str,
    *kinds: Kind,
    also: tuple[str, ...] = (),
    name: str = "",
    is_closed: bool = False,
    ignored: tuple[str, ...] = (),
) -> Shape:
    """Return the shape of a place that holds one of several kinds of objects. `also`: fields that are passed along."""
    tag = BodyField(name=tag, type=STRING) if isinstance(tag, str) else tag
    merged = {tag.name: tag, **{name: BodyField(name=name) for name in also}}
    for field in (field for one in kinds for field in one.fields):
        known = merged.get(field.name)
        merged[field.name] = field if known is None else _joined(known, field)
    fields = tuple(merged.values())
    return Shape(fields, name=name, is_closed=is_closed, ignored=ignored, tag=tag.name, kinds=kinds)


def _joined(first: BodyField, second: BodyField) -> BodyField:
    """Return the field of two kinds of objects, with all that is known of what it holds."""
    return attrs.evolve(first, inner=_both(first.inner, second.inner), items=_both(first.items, second.items))


def _both(first: Shape | None, second: Shape | None) -> Shape | None:
    if first is None or second is None or first is second:
        return first or second
    merged = {**first.by_name}
    for field in second.fields:
        merged[field.name] = _joined(merged[field.name], field) if field.name in merged else field
    return Shape(tuple(merged.values()))
