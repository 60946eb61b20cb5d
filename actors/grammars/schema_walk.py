"""The schemas within a JSON schema, and the targets of its references.

References are those of drafts 4 to 2020-12: JSON pointers, percent-encoded or not, anchors, and the ids of schemas
within the document. A dynamic reference is followed if it can lead to one place only. Nothing is fetched.

Used to check a schema (`schema_holes.py`) and to drop what cannot be enforced (`schema_loosening.py`). What must always
hold: each reachable schema is visited once, and no other; the time is linear in the length of the document.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

import attrs

from .schema_places import Place, key_in

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
MAX_URI_CHARS = 2048
"""Of an id; a longer one is ignored."""
_MAX_COMPARISONS = 20_000
"""Of the schemas of one document in pairs (`schema_disjoint.py`), and schemas that are read for them."""
_SINGLE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("patternProperties", "properties")
_OTHER_SINGLE = ("contains", "contentSchema", "else", "if", "not", "propertyNames", "then")
_OTHER_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
DEFINITIONS = ("$defs", "definitions")
NAMES = ("$anchor", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "id")
"""Keywords that name a schema or its draft."""
_IDS = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


@attrs.frozen
class Located:
    """A schema, where it is, and the URI to which its references are relative."""

    schema: Any
    place: Place
    base: str
    holder: Any = None
    """The object or list that it is in; None: it is the whole document."""
    key: str | int = ""


class Document:
    def __init__(self, root: dict[str, Any]) -> None:
        self._resources: dict[str, Located] = {}
        self._anchors: dict[tuple[str, str], Located] = {}
        self._dynamic: Counter[str] = Counter()
        """How many schemas have each dynamic anchor; under "", how many have a recursive one."""
        self._circular: set[int] | None = None
        self.comparisons_left = _MAX_COMPARISONS
        base = _base_of(root, "")
        self.root = Located(root, Place(), base)
        self._resources.update({"": self.root, base: self.root})
        waiting = [self.root]
        for found in waiting:  # which grows
            self._note_names(found)
            parts = _parts(found, (*_SINGLE, *_OTHER_SINGLE, *_UNEVALUATED), _LISTS, (*_MAPS, *_OTHER_MAPS))
            waiting += (part for part in parts if isinstance(part.schema, dict))

    def _note_names(self, found: Located) -> None:
        schema = found.schema
        if any(type(schema.get(key)) is str for key in _IDS):
            self._resources.setdefault(found.base, found)
        for key in _IDS:
            if type(name := schema.get(key)) is str and name.startswith("#") and len(name) > 1:  # of older drafts
                self._anchors.setdefault((found.base, name[1:]), found)
        for key in _ANCHORS:
            if type(name := schema.get(key)) is str:
                self._anchors.setdefault((found.base, name), found)
        if type(name := schema.get("$dynamicAnchor")) is str:
            self._dynamic[name] += 1
        self._dynamic[""] += schema.get("$recursiveAnchor") is True

    def reference_of(self, schema: dict[str, Any]) -> str | None:
        """Return the reference of a schema; None if there is none, or if it may lead to several places."""
        found = [schema[key] for key in REFERENCES if key in schema]
        if len(found) != 1 or type(reference := found[0]) is not str:
            return None
        if "$recursiveRef" in schema and self._dynamic[""]:
            return None
        if "$dynamicRef" in schema and self._dynamic[reference.partition("#")[2]] > 1:
            return None
        return str(reference)

    def target_of(self, found: Located) -> Located | None:
        """Return the target of a schema's reference, a schema or a boolean, if there is one."""
        if (reference := self.reference_of(found.schema)) is None:
            return None
        uri, _, fragment = reference.partition("#")
        name = _joined(found.base, uri) if uri else found.base
        resource = None if name is None else self._resources.get(name)
        fragment = unquote(fragment)
        target = None if resource is None else self._within(resource, fragment)
        # an id is often a mere name, and the author's references are not relative to it
        return self._within(self.root, fragment) if target is None and not uri else target

    def is_circular(self, found: Located) -> bool:
        """Return whether a schema's reference leads back to itself for the same value."""
        if self._circular is None:
            self._circular = set(self._find_circles())
        return id(found.schema) in self._circular

    def _find_circles(self) -> Iterator[int]:
        """Yield the schemas whose references close a circle of references and `allOf`."""
        entered, left = set[int](), set[int]()
        for start in reachable(self):
            waiting = [(start, False)]
            while waiting:
                found, is_done = waiting.pop()
                key = id(found.schema)
                if is_done:
                    left.add(key)
                elif key not in entered:
                    entered.add(key)
                    waiting.append((found, True))
                    parts = _parts(found, (), ("allOf",), ())
                    waiting += ((part, False) for part in parts if isinstance(part.schema, dict))
                    target = self.target_of(found)
                    if target is not None and isinstance(target.schema, dict):
                        if id(target.schema) in entered and id(target.schema) not in left:
                            yield key
                        waiting.append((target, False))

    def _within(self, found: Located, fragment: str) -> Located | None:
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((found.base, fragment))
        for name in fragment.split("/")[1:]:
            key = key_in(found.schema, name)
            if key is None:
                return None
            found = _inner(found.schema[key], found.schema, key, found.place, found.base)
        return found if isinstance(found.schema, dict | bool) else None


def reachable(document: Document) -> Iterator[Located]:
    """Yield the schemas that apply to a value or its parts, outer ones first. They may be changed meanwhile."""
    waiting = deque([document.root])
    seen = {id(document.root.schema): document.root}
    while waiting:
        found = waiting.popleft()
        yield found
        parts = list(_parts(found, (*_SINGLE, *_UNEVALUATED), _LISTS, _MAPS))
        if (target := document.target_of(found)) is not None:
            parts.append(target)
        for part in parts:
            if isinstance(part.schema, dict) and id(part.schema) not in seen:
                seen[id(part.schema)] = part
                waiting.append(part)


def _parts(found: Located, single: tuple[str, ...], lists: tuple[str, ...], maps: tuple[str, ...]) -> Iterator[Located]:
    for keyword, value in found.schema.items():
        place = Place(keyword, found.place)
        if isinstance(value, dict) and keyword in single:
            yield Located(value, place, _base_of(value, found.base), found.schema, keyword)
        elif isinstance(value, dict) and keyword in maps:
            yield from (_inner(part, value, name, place, found.base) for name, part in value.items())
        elif isinstance(value, list) and keyword in lists:
            yield from (_inner(part, value, index, place, found.base) for index, part in enumerate(value))


def _inner(part: Any, holder: Any, key: str | int, place: Place, base: str) -> Located:
    return Located(part, Place(str(key), place), _base_of(part, base), holder, key)


def _base_of(schema: Any, base: str) -> str:
    """Return the URI to which references within a schema are relative."""
    for key in _IDS if isinstance(schema, dict) else ():
        if type(name := schema.get(key)) is str and not name.startswith("#"):
            base = _joined(base, name.partition("#")[0]) or base
    return base


def _joined(base: str, uri: str) -> str | None:
    """Return `uri` resolved against `base`; None if it is invalid or too long."""
    if len(uri) > MAX_URI_CHARS or len(base) > MAX_URI_CHARS:
        return None
    try:
        return urljoin(base, uri) or uri
    except ValueError:
        return None
