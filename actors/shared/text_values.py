"""Strings that a model does not write as JSON, as terminals of a grammar; and what else such formats have in common.

Used for the values of calls that are not JSON (`tagged_values.py`, `dialect_values.py`). What must always hold: a
keyword that cannot be held is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .schema_patterns import DATE
from .search_patterns import GROUP, whole_pattern

MAX_LENGTH = 1 << 16
"""Of strings whose length is limited."""
NOTES = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format", "nullable"}
    | {"readOnly", "title", "type", "writeOnly"}
)
"""Keywords that are read, or that restrict nothing."""
FREE_KEYWORDS = NOTES - {"format"}
"""Of a string that may be any."""
_TEXT_KEYWORDS = NOTES | {"maxLength", "minLength", "pattern"}
SCALARS = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": DATE,
    "date-time": f"{DATE}T{_TIME}",
    "time": _TIME,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}


class UnsupportedSchema(ValueError):
    """A schema that the model's format of calls cannot be held to."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param
        self.problem = problem


def quoted(text: str) -> str:
    """Return `text` as a string of the grammar, or of JSON."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """Return a pattern that matches `text` alone, to stand between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def check_keywords(schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raise UnsupportedSchema for a keyword that is not among `known`."""
    for keyword in schema:
        if keyword not in known and not keyword.startswith("x-"):
            raise refusal(where, keyword)


def refusal(where: str, keyword: str) -> UnsupportedSchema:
    """Return the error for a keyword that cannot be held."""
    return UnsupportedSchema(where, f"the keyword `{keyword[:40]}` is not supported in this model's format of calls")


def may_be_refused(rule: str) -> bool:
    """Return whether a rule has a client's schema or pattern in it, which the library may not support."""
    return "%json" in rule or GROUP in rule


def text_terminal(schema: Mapping[str, Any], ends: Iterable[str], where: str) -> str:
    """Return a terminal for the strings that a schema allows and that contain none of `ends`.

    Raises UnsupportedSchema.
    """
    if schema.get("type") == "string":
        check_keywords(schema, _TEXT_KEYWORDS, where)
    elif found := {"maxLength", "minLength", "pattern"} & schema.keys():
        raise refusal(where, min(found))
    held = []
    form = schema.get("format")
    if form is not None:
        if not (isinstance(form, str) and form in _FORMATS):
            raise refusal(where, "format")
        held.append(f"/{_FORMATS[form]}/")
    if "pattern" in schema:
        whole = whole_pattern(schema["pattern"])
        if whole is None:
            raise refusal(where, "pattern")
        held.append(f"/{whole}/")
    for key in ("minLength", "maxLength"):
        if key in schema and not (type(schema[key]) is int and 0 <= schema[key] <= MAX_LENGTH):
            raise UnsupportedSchema(where, f"`{key}` must be an integer of at most {MAX_LENGTH}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    held.append(f"/(?s:.{'*' if not least and most == '' else f'{{{least},{most}}}'})/")
    held.append(f"~/(?s:.*)({'|'.join(map(pattern_of, ends))})(?s:.*)/")
    return f"({' & '.join(held)})"
