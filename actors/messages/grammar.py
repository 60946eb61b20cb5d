"""What an output has to look like, if its client says so."""

from __future__ import annotations

from enum import StrEnum

import attrs

MAX_GRAMMAR_BYTES = 1 << 18
"""Of one grammar, whatever the configuration: about a millisecond to write as JSON."""


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
