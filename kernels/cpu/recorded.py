"""What a model asked for, call by call: what `recorder.py` writes, `fusing.py` joins and `layout.py` gives memory.

What must always hold: a value is written by one note, before any that reads it.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Place:
    """Where a tensor lies in the rows of a value."""

    value: int
    offset: int
    """Elements from the start of each row."""


@attrs.define
class RecordedOp:
    """One call: its numbers, and which values stand behind its pointers."""

    fields: dict[str, Any]
    x: Place | None
    z: Place | None
    y: Place
    v: Place | None = None
    """Attention that writes the cache itself: the values, in the rows of x."""
    room: Place | None = None
    """For what stands between two operations that were joined into this one."""
    raw: Place | None = None
    """The same, after the product."""

    @property
    def kind(self) -> int:
        return int(self.fields["kind"])

    @property
    def read(self) -> list[int]:
        return [place.value for place in (self.x, self.z, self.v) if place is not None]

    @property
    def written(self) -> list[int]:
        return [place.value for place in (self.y, self.room, self.raw) if place is not None]
