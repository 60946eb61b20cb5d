"""Fields of other servers (`foreign_table.py`): refused if they would change the answer, and else named as ignored.

Used by the readers of every endpoint, and by `ignored_fields.py`. What must always hold: a body with very many fields
costs no more than one with few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..request.errors import unsupported_parameter
from .foreign_table import FOREIGN, ForeignField

_PLACES = {name: place for place, name in enumerate(FOREIGN)}


def refuse_foreign(body: Mapping[str, Any], *, with_hints: bool = True) -> None:
    """Raise APIError for the first field of the table that would change the answer.

    `with_hints`: the error says which field means the same on chat and completions.
    """
    for field in _given(body):
        if field.is_refused and not _only_members(field, body[field.name]) and _has_effect(field, body):
            raise unsupported_parameter(field.name, field.instead if with_hints else None)


def ignored_foreign(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the table that ask for something, and are not refused."""
    return tuple(field.name for field in _given(body) if not field.is_refused or _only_members(field, body[field.name]))


def _given(body: Mapping[str, Any]) -> Iterable[ForeignField]:
    """Return the fields that have other than neutral values, in the table's order."""
    for name in sorted(body.keys() & FOREIGN.keys(), key=_PLACES.__getitem__):
        field, value = FOREIGN[name], body[name]
        if value is not None and not _is_neutral(field, value):
            yield field


def _is_neutral(field: ForeignField, value: Any) -> bool:
    # Python takes true for 1
    return any(value == neutral and (value is True) == (neutral is True) for neutral in field.neutral)


def _only_members(field: ForeignField, value: Any) -> bool:
    return bool(field.members) and type(value) is dict and value.keys() <= field.members


def _has_effect(field: ForeignField, body: Mapping[str, Any]) -> bool:
    others = field.only_with
    return not others or any(body.get(name) not in (None, neutral) for name, neutral in others.items())
