"""Which fields of a body nobody has read: they are named to the client, which may have misspelt one.

Each API has a `Shape` of what its readers know (`api/openai/shapes.py`, `api/anthropic/shapes.py`). When a body has
been read it is compared with its shape, and what is not in it goes into the response header `X-Quipu-Ignored-Fields`:
paths as in the `param` of an error, percent-encoded, with commas between.

What must always hold: the header is ASCII and at most `MAX_HEADER_BYTES` long; the comparison is linear in the body and
lets others run, like its reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

import attrs

from .pace import Pace

MAX_NAMES = 16
MAX_HEADER_BYTES = 1024
AND_MORE = quote("…")
"""Stands last where there are more."""
_MAX_KEYS = 256
"""Of one object that are looked at; where there are more, there are more to be named."""


@attrs.frozen(kw_only=True)
class Shape:
    """What is known of one object."""

    known: frozenset[str]
    objects: Mapping[str, Shape] = attrs.field(factory=dict)
    """Of its fields, those that hold an object whose fields are known as well."""
    lists: Mapping[str, Shape] = attrs.field(factory=dict)
    """Those that hold a list of such objects, or something else."""
    index: str = "[{}]"
    """How an item of such a list is written in a path."""


async def ignored_fields(body: Mapping[str, Any], shape: Shape) -> str | None:
    """The header's value for a body that has been read, None where every field is known."""
    names = _Names()
    async with Pace() as pace:
        await _compare(body, shape, "", names, pace)
    return names.header()


async def _compare(values: Mapping[str, Any], shape: Shape, path: str, names: _Names, pace: Pace) -> None:
    await pace.tick()
    if not values.keys() <= shape.known:
        for name, value in islice(values.items(), _MAX_KEYS):
            if value is not None and name not in shape.known:
                names.add(f"{path}{name[:MAX_HEADER_BYTES]}")
        if len(values) > _MAX_KEYS:
            names.cut()
        await pace.tick(min(len(values), _MAX_KEYS) // 8)
    for name, inner in shape.objects.items():
        value = values.get(name)
        if type(value) is dict:
            await _compare(value, inner, f"{path}{name}.", names, pace)
    for name, inner in shape.lists.items():
        value = values.get(name)
        if type(value) is list:
            for index, item in enumerate(value):
                if names.is_full:
                    return
                if type(item) is dict:
                    await _compare(item, inner, f"{path}{name}{shape.index.format(index)}.", names, pace)


class _Names:
    """What goes into the header."""

    def __init__(self) -> None:
        self._encoded: list[str] = []
        self._num_bytes = len(AND_MORE)
        self.is_full = False

    def add(self, path: str) -> None:
        if self.is_full:
            return
        encoded = quote(path, safe="[]", errors="replace")
        num_bytes = self._num_bytes + len(encoded) + 1
        if len(self._encoded) == MAX_NAMES or num_bytes > MAX_HEADER_BYTES:
            self.cut()
        else:
            self._encoded.append(encoded)
            self._num_bytes = num_bytes

    def cut(self) -> None:
        """There are more than can be named."""
        self.is_full = True

    def header(self) -> str | None:
        return ",".join([*self._encoded, *([AND_MORE] if self.is_full else [])]) or None
