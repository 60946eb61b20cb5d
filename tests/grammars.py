"""Grammars for tests, and what must hold of an output that was made under one."""

from __future__ import annotations

import json
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

from quipu.actors.grammars.grammar_library import GrammarLibrary, load_grammars
from quipu.actors.grammars.grammar_text import grammar_text
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from tests.tiny import TINY

EOS = 2
"""Of the tiny checkpoint."""
PARAM = "response_format"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 2},
        "home": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LATE_DIGITS = 100
UNION = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 3}]}


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value), PARAM)


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern, PARAM)


def costly_later() -> GrammarSpec:
    """Return a grammar that is too complex only after many tokens, so that its check finds nothing."""
    letters = [f"/{letter}+/ many" for letter in string.ascii_lowercase]
    source = f"start: /[0-9]{{{LATE_DIGITS}}}/ many\nmany: {' | '.join(letters)}"
    return GrammarSpec(GrammarKind.LARK, source, PARAM)


@cache
def tiny_grammars(folder: Path = TINY) -> GrammarLibrary:
    library = load_grammars((folder / "tokenizer.json").read_bytes(), (EOS,))
    assert library is not None
    return library


def accepts(spec: GrammarSpec, token_ids: list[int]) -> bool:
    """Return whether an output, whole or cut, is one that the grammar allows."""
    return tiny_grammars().compile(grammar_text(spec)).accepts(token_ids)


def check_person(text: str) -> None:
    """Assert that a text is a compact `PERSON`."""
    person = json.loads(text)
    assert json.dumps(person, separators=(",", ":"), ensure_ascii=False) == text or "\\" in text
    assert set(person) <= set(PERSON["properties"]) and {"name", "age", "tags"} <= set(person)
    assert len(person["name"]) <= 6 and type(person["age"]) is int and 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 2 and all(tag in ("a", "b", 3) for tag in person["tags"])
    assert re.fullmatch("[0-9]{5}", person.get("home", {}).get("zip", "00000"))


def check_union(text: str) -> None:
    """Assert that a text is a compact `UNION`."""
    value = json.loads(text)
    assert value in (True, False) or (set(value) == {None} and len(value) <= 3)
    assert " " not in text


def endless_later(prefix: str = "[a-z ]{4}") -> GrammarSpec:
    """Return a grammar for which the library searches without end once an output matches `prefix`.

    The longest match of `a+` takes each `a`, so that the `ab` that has to follow is forced and never found.
    """
    return GrammarSpec(GrammarKind.LARK, f'start: /{prefix}/ /a+/ "ab"', PARAM)
