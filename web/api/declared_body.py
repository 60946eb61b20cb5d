"""A body, read as `body_table.py` declares its fields, and refused for those that its endpoint does not have.

What must always hold: which of several fields is refused does not depend on the body's order.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.config.declarations import CHAT, COMPLETIONS

from ..request.errors import unknown_parameter, unsupported_parameter
from .body_field import BodyField, Why
from .body_table import SHAPES
from .fields import Fields
from .foreign_table import refuse_foreign


class Body(Fields):
    __slots__ = ("endpoint",)

    def __init__(self, values: dict[str, Any], endpoint: str) -> None:
        super().__init__(values, declared=SHAPES[endpoint])
        self.endpoint = endpoint

    def refuse_unsupported(self) -> None:
        """Raise APIError for the first field that would change the answer and is not implemented."""
        refuse_foreign(self.values, with_hints=self.endpoint in (CHAT, COMPLETIONS))
        self._refuse(Why.UNSUPPORTED)

    def refuse_unknown(self) -> None:
        """Raise APIError for the first field that only other endpoints have."""
        self._refuse(Why.UNKNOWN)

    def _refuse(self, why: Why) -> None:
        for field in _REFUSED[self.endpoint, why]:
            value, refusal = self.get(field.name), field.refusals[self.endpoint]
            if value is None or refusal.accepts(value):
                continue
            refuse = unknown_parameter if why is Why.UNKNOWN else unsupported_parameter
            raise refuse(field.name, refusal.instead)

    def carried(self, message: type[attrs.AttrsInstance]) -> dict[str, Any]:
        """Return the fields that a message carries as they are, by its attributes and in their order."""
        names = _CARRIED[self.endpoint]
        return {
            attribute.name: self.value(names[attribute.name])
            for attribute in attrs.fields(message)
            if attribute.name in names
        }

    def value(self, name: str) -> Any:
        """Return a field of its default's type; the default where the endpoint does not read it."""
        field = SHAPES[self.endpoint].by_name[name]
        if self.endpoint not in field.apis:
            return field.default
        if type(field.default) is bool:
            return self.flag(field.name)
        value = self.integer(field.name) if type(field.default) is int else self.optional_text(field.name)
        return field.default if value is None else value


def _refused(endpoint: str, why: Why) -> list[BodyField]:
    known = SHAPES[endpoint].fields
    return [field for field in known if endpoint in field.refusals and field.refusals[endpoint].why is why]


_REFUSED = {(endpoint, why): _refused(endpoint, why) for endpoint in SHAPES for why in Why}
_CARRIED = {
    endpoint: {field.attribute: field.name for field in declared.fields if field.attribute}
    for endpoint, declared in SHAPES.items()
}
