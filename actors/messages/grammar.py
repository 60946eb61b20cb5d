"""What an output has to look like, if its client says so."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from urllib.parse import quote, unquote

import attrs

_PATH = "[]#/$"


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@attrs.frozen
class GrammarSpec:
    """A grammar as its client sent it, or as it was made from the request's tools. Checked by the tokenizer."""

    kind: GrammarKind
    source: str
    """A JSON schema, a pattern, a JSON list of strings, or a grammar in llguidance's dialect of Lark."""
    param: str
    """The field it comes from, for error messages."""


SCHEMA_FROM = "// schema from "
"""Begins a comment in a grammar of calls: the field from which the schemas in the next lines are."""
LOOSE_SCHEMA_FROM = f"{SCHEMA_FROM}loose:"
"""The same, of schemas that lose what cannot be held."""
STRICT_SCHEMA_FROM = f"{SCHEMA_FROM}strict:"
"""The same, of schemas whose objects have no other properties than they declare."""
MAX_IGNORED = 32
"""Dropped parts of schemas that a grammar names."""
MAX_IGNORED_CHARS = 1024
"""Of the name of one of them, percent-encoded."""
_IGNORED = "// ignored: "


def ignored_comment(paths: Sequence[str]) -> str:
    """Return the last line of a grammar in Lark, which names the dropped parts of its schemas."""
    if not paths:
        return ""
    names = (quote(path, safe=_PATH, errors="replace")[:MAX_IGNORED_CHARS] for path in paths[:MAX_IGNORED])
    return f"\n{_IGNORED}{','.join(names)}\n"


def ignored_within(text: str) -> tuple[str, ...]:
    """Return what `ignored_comment` tells in a grammar that has become the library's text."""
    _, is_there, rest = text.rpartition(f"\n{_IGNORED}")
    return tuple(map(unquote, rest.partition("\n")[0].split(","))) if is_there else ()
