"""Which fields of a body were ignored. They are reported to the client, which may have misspelt one.

The response header `X-Quipu-Ignored-Fields` has the paths of fields that this model cannot honour, of those that are
not declared (`body_table.py`), and of what the tokenizer drops from the schemas of tools: as in the `param` of an
error, percent-encoded and comma-separated.

What must always hold: the header is ASCII and at most `MAX_HEADER_BYTES` long; the comparison is linear in the body and
has checkpoints, like the readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

import attrs

from .body_field import Shape
from .foreign_table import ignored_foreign
from .pace import Pace

MAX_NAMES = 16
MAX_HEADER_BYTES = 1024
AND_MORE = quote("…")
"""The last entry, if there are more names."""
_MAX_KEYS = 256
"""Keys of one object that are compared; with more keys, the header says that there are more names."""


async def ignored_fields(body: Mapping[str, Any], shape: Shape, unused: Iterable[str] = ()) -> IgnoredNames:
    """Return the names of a body's fields that are unknown, after `unused`: paths of known ones without effect."""
    unused = (*unused, *ignored_foreign(body))
    names = IgnoredNames()
    for path in unused[: MAX_NAMES + 1]:
        names.add(path)
    async with Pace() as pace:
        await _Comparison(names, frozenset(unused), shape.index, pace).compare(body, shape, "")
    return names


@attrs.frozen
class _Comparison:
    names: IgnoredNames
    skipped: frozenset[str]
    """Paths that have been named already."""
    index: str
    """How an index of a list is written in a path."""
    pace: Pace

    async def compare(self, values: Mapping[str, Any], shape: Shape, path: str) -> None:
        """Add the names of one object's unknown fields."""
        await self.pace.tick()
        if not values.keys() <= shape.by_name.keys():
            for name, value in islice(values.items(), _MAX_KEYS):
                if value is not None and name not in shape.by_name:
                    self.names.add(f"{path}{name[:MAX_HEADER_BYTES]}")
            if len(values) > _MAX_KEYS:
                self.names.is_full = True
            await self.pace.tick(min(len(values), _MAX_KEYS) // 8)
        for name, inner in shape.objects.items():
            value = values.get(name)
            if type(value) is dict:
                await self.compare(value, inner, f"{path}{name}.")
        for name, inner in shape.lists.items():
            value = values.get(name)
            if type(value) is list:
                for index, item in enumerate(value):
                    if self.names.is_full:
                        return
                    where = f"{path}{name}{self.index.format(index)}"
                    if type(item) is dict and where not in self.skipped:
                        await self.compare(item, inner, f"{where}.")


class IgnoredNames:
    """The names in the header, within its limits."""

    def __init__(self) -> None:
        self._encoded: list[str] = []
        self._num_bytes = len(AND_MORE)
        self.is_full = False
        """There are more names than fit."""

    def add(self, path: str) -> None:
        if self.is_full:
            return
        encoded = quote(path, safe="[]", errors="replace")
        num_bytes = self._num_bytes + len(encoded) + 1
        if len(self._encoded) == MAX_NAMES or num_bytes > MAX_HEADER_BYTES:
            self.is_full = True
        else:
            self._encoded.append(encoded)
            self._num_bytes = num_bytes

    def header(self, more: Iterable[str] = ()) -> str | None:
        """Return the header's value, with `more` names; None if every field is known and has an effect."""
        for path in more:
            self.add(path)
        return ",".join([*self._encoded, *([AND_MORE] if self.is_full else [])]) or None
