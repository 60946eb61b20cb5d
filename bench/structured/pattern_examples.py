"""Short strings that match the patterns and formats of a schema.

Used to end outputs that were cut off: text drawn at random does not become an address or `${{ … }}` by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

# the only parser of patterns; whether these modules have types depends on what is installed
ops: Any = import_module("re._constants")
parser: Any = import_module("re._parser")

MAX_EXAMPLES = 64
_OF_FORMATS = {
    "date": "2024-02-03",
    "date-time": "2024-02-03T04:05:06Z",
    "duration": "P1D",
    "email": "a@b.co",
    "hostname": "a.co",
    "idn-email": "a@b.co",
    "iri": "a:b",
    "ipv4": "1.2.3.4",
    "ipv6": "::1",
    "time": "04:05:06Z",
    "uri": "a:b",
    "uuid": "01234567-89ab-4cde-8f01-23456789abcd",
}
_UNICODE_CLASS = re.compile(r"\\p\{L[^}]*\}")
_OF_CATEGORIES: dict[Any, str] = {ops.CATEGORY_DIGIT: "0", ops.CATEGORY_WORD: "a", ops.CATEGORY_SPACE: " "}


def examples_of(schema: Any) -> list[str]:
    """Return strings, of patterns that Python can parse, and of formats. None needs an escape in JSON."""
    found = dict.fromkeys(text for part in _parts(schema) for text in _strings(part))
    return [text for text in found if text and json.dumps(text, ensure_ascii=False) == f'"{text}"'][:MAX_EXAMPLES]


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a schema."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _strings(part: dict[str, Any]) -> Iterator[str]:
    if isinstance(name := part.get("format"), str) and name in _OF_FORMATS:
        yield _OF_FORMATS[name]
    patterns = [part.get("pattern")]
    if isinstance(more := part.get("patternProperties"), dict):
        patterns += more
    for pattern in patterns:
        if isinstance(pattern, str):
            try:
                tree = parser.parse(_UNICODE_CLASS.sub("a", pattern))
            except (re.error, OverflowError, RecursionError):
                continue
            yield _written(tree, last=False)
            yield _written(tree, last=True)


def _written(tree: Any, *, last: bool) -> str:
    """Return a string that a pattern matches, unless it looks around: of its branches, the first or the last."""
    return "".join(_one(op, argument, last) for op, argument in tree)


def _one(op: Any, argument: Any, last: bool) -> str:
    if op is ops.LITERAL:
        return chr(argument)
    if op is ops.ANY or op is ops.NOT_LITERAL:
        return "b" if argument == ord("a") else "a"
    if op is ops.IN:
        return _of_set(argument)
    if op is ops.SUBPATTERN:
        return _written(argument[-1], last=last)
    if op is ops.BRANCH:
        return _written(argument[1][-1 if last else 0], last=last)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        least, most, repeated = argument
        count: int = max(least, min(most, int(last)))
        return _written(repeated, last=last) * count
    return ""  # an anchor, or something that looks around


def _of_set(members: Any) -> str:
    is_negated = members[0][0] is ops.NEGATE
    for op, argument in members[is_negated:]:
        if is_negated:
            break
        if op is ops.LITERAL:
            return chr(argument)
        if op is ops.RANGE:
            return chr(argument[0])
        if op is ops.CATEGORY and argument in _OF_CATEGORIES:
            return _OF_CATEGORIES[argument]
    return "a"
