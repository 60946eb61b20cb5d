"""Reading a body as `body_table.py` declares its fields, and refusing those that its endpoint does not have.

What must always hold: which of several fields is refused does not depend on the body's order.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.config.declarations import CHAT, COMPLETIONS, EVERY_API

from ..request.errors import unknown_parameter, unsupported_parameter
from .body_field import BodyField, Why
from .body_table import SHAPES
from .fields import Fields
from .foreign_fields import refuse_foreign


def fields_of(body: dict[str, Any], endpoint: str) -> Fields:
    """Return the fields of a body as an endpoint knows them."""
    return Fields(body, declared=SHAPES[endpoint])


def refuse_unsupported(fields: Fields, endpoint: str) -> None:
    """Raise APIError for the first field that would change the answer and is not implemented here, or not at all."""
    refuse_foreign(fields.values, with_hints=endpoint in (CHAT, COMPLETIONS))
    _refuse(fields, endpoint, Why.UNSUPPORTED)


def refuse_unknown(fields: Fields, endpoint: str) -> None:
    """Raise APIError for the first field that only other endpoints have."""
    _refuse(fields, endpoint, Why.UNKNOWN)


def _refuse(fields: Fields, endpoint: str, why: Why) -> None:
    for field in _REFUSED[endpoint, why]:
        value, refusal = fields.get(field.name), field.refusals[endpoint]
        if value is None or refusal.accepts(value):
            continue
        if why is Why.UNKNOWN:
            raise unknown_parameter(field.name, refusal.instead)
        raise unsupported_parameter(field.name, refusal.instead)


def read_carried(fields: Fields, endpoint: str, carrier: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """Return the values of the fields that an endpoint reads and a message carries as they are, by its attributes.

    They are read in the order of the attributes. Raises APIError.
    """
    carried = _CARRIED[endpoint]
    return {
        attribute.name: _read(fields, carried[attribute.name])
        for attribute in attrs.fields(carrier)
        if attribute.name in carried
    }


def _read(fields: Fields, field: BodyField) -> Any:
    """Return a value of the type of its default."""
    if type(field.default) is bool:
        return fields.flag(field.name)
    value = fields.integer(field.name) if type(field.default) is int else fields.optional_text(field.name)
    return field.default if value is None else value


def _refused(endpoint: str, why: Why) -> list[BodyField]:
    known = SHAPES[endpoint].fields
    return [field for field in known if endpoint in field.refusals and field.refusals[endpoint].why is why]


_REFUSED = {(endpoint, why): _refused(endpoint, why) for endpoint in EVERY_API for why in Why}
_CARRIED = {
    endpoint: {
        field.attribute: field for field in SHAPES[endpoint].fields if field.attribute and endpoint in field.apis
    }
    for endpoint in EVERY_API
}
