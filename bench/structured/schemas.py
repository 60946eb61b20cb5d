"""The schemas that `python -m bench.structured` compiles and lets outputs match.

`make schemas` fetches two collections: the JSON-Schema-Test-Suite, which comes with the source of the package
`jsonschema`, and the schemas of common configuration files, which the package `check-jsonschema` contains. Neither is
part of this repository. Without them, and with `--quick`, there are a few schemas of our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

HOME = Path(__file__).resolve().parents[2] / ".peers" / "schemas"
PACKAGES = HOME / "packages"
SUITE = "json/tests/draft2020-12"
VENDORED = "check_jsonschema/builtin_schemas/vendor"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FIELDS = {f"field_{i}": {"type": "string", "enum": [f"value_{j}_{i}" for j in range(20)]} for i in range(100)}
TIMED: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "100 required fields": {"type": "object", "properties": FIELDS, "required": list(FIELDS)},
    "2000 strings in an enum": {"enum": [f"value number {i}" for i in range(2000)]},
}
TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}


@attrs.frozen
class Instance:
    """A value of which the collection says whether a schema allows it."""

    value: Any
    is_valid: bool
    name: str = ""


@attrs.frozen
class Entry:
    """A schema of a collection."""

    name: str
    schema: Any
    instances: tuple[Instance, ...] = ()
    check: Callable[[Any], bool] | None = None
    """Whether the schema allows a value, where that does not take a validator."""


@attrs.frozen
class Collection:
    name: str
    entries: tuple[Entry, ...]


def _is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "tags", "address"]
        and isinstance(value["name"], str)
        and type(value["age"]) is int
        and set(value["tags"]) <= {"a", "b", "c"}
        and list(value["address"]) == ["street", "zip"]
        and isinstance(value["address"]["street"], str)
        and re.fullmatch("[0-9]{5}", value["address"]["zip"]) is not None
    )


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict) and (not value or (list(value) == ["next"] and _is_tree(value["next"])))


def _is_date(value: Any) -> bool:
    date.fromisoformat(value)
    return True


BUILT_IN = Collection(
    "built in",
    (
        Entry("person", PERSON, check=_is_person),
        Entry("date", {"type": "string", "format": "date"}, (Instance("2021-02-29", False),), _is_date),
        Entry(
            "tree",
            {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
            (Instance({"next": {}}, True), Instance({"next": 1}, False)),
            _is_tree,
        ),
        Entry(
            "pattern",
            {"type": "string", "pattern": "^.[^\\s]$"},
            (Instance("ab", True), Instance("\rb", False), Instance("a\ufeff", False)),
            lambda value: len(value) == 2 and not value[1].isspace(),
        ),
        Entry(
            "union",
            {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 3}]},
            (Instance(True, True), Instance(2, False)),
            lambda value: type(value) is bool or (type(value) is int and value >= 3),
        ),
        Entry("refused", {"type": "array", "uniqueItems": True}),
    ),
)


def collections(folders: list[Path]) -> list[Collection]:
    """Return the schemas in some folders; without any, those that `make schemas` has fetched."""
    if folders:
        return [Collection(str(folder), tuple(_entries(folder))) for folder in folders]
    found = []
    for path in HOME.glob("jsonschema-*/"):
        name = f"JSON-Schema-Test-Suite, draft 2020-12 (of {path.name})"
        found.append(Collection(name, tuple(_entries(path / SUITE))))
    for path in PACKAGES.glob("check_jsonschema-*.dist-info/"):
        name = f"configuration files ({path.name.removesuffix('.dist-info')})"
        found.append(Collection(name, tuple(_entries(PACKAGES / VENDORED))))
    return found


def _entries(folder: Path) -> Iterator[Entry]:
    """Yield the schemas in a folder: each JSON file has one, or the test suite's list of schemas and instances."""
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder).with_suffix(""))
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            yield Entry(name, content)
            yield from _definitions(name, content)
        for case in content if isinstance(content, list) else ():
            instances = (Instance(test["data"], test["valid"], test["description"]) for test in case["tests"])
            yield Entry(f"{name}: {case['description']}", case["schema"], tuple(instances))


def _definitions(name: str, schema: dict[str, Any]) -> Iterator[Entry]:
    """Yield a schema for each definition within a schema, with the definitions that it needs."""
    kept: dict[str, Any] = {keyword: schema[keyword] for keyword in ("$schema", "$id") if keyword in schema}
    for keyword in ("$defs", "definitions"):
        parts = schema.get(keyword, {})
        for part in parts:
            pointer = part.replace("~", "~0").replace("/", "~1")
            root = {**kept, "$ref": f"#/{keyword}/{quote(pointer)}", keyword: _needed(part, keyword, parts)}
            yield Entry(f"{name}#/{keyword}/{part}", root)


def _needed(name: str, keyword: str, parts: dict[str, Any]) -> dict[str, Any]:
    needed, waiting = {name: parts[name]}, [parts[name]]
    while waiting:
        names = set(re.findall(rf'"#/{re.escape(keyword)}/([^/"]+)', json.dumps(waiting.pop())))
        for found in sorted(names & parts.keys() - needed.keys()):
            needed[found] = parts[found]
            waiting.append(parts[found])
    return needed
