"""Blocks of the fake backend (`fake.py`) as bytes: eight for each slot.

What must always hold: writing what was read gives the same slots, those that no pass has written included.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_SLOT = struct.Struct("<q")
_UNWRITTEN = -1
SLOT_BYTES = _SLOT.size


def read_slots(blocks: Sequence[Sequence[int | None]], to: memoryview) -> None:
    """Copy the slots of blocks, one after the other. Raises ValueError if the memory has another size."""
    slots = [_UNWRITTEN if value is None else value for block in blocks for value in block]
    _check_size(slots, to)
    to[:] = b"".join(map(_SLOT.pack, slots))


def write_slots(blocks: Sequence[list[int | None]], source: memoryview) -> None:
    """Overwrite the slots of blocks with what `read_slots` has read. Raises ValueError for memory of another size."""
    _check_size([value for block in blocks for value in block], source)
    values = (None if value == _UNWRITTEN else value for (value,) in _SLOT.iter_unpack(source))
    for block in blocks:
        block[:] = [next(values) for _ in block]


def _check_size(slots: Sequence[int | None], memory: memoryview) -> None:
    if memory.nbytes != len(slots) * SLOT_BYTES:
        raise ValueError(f"{memory.nbytes} bytes for {len(slots)} slots of {SLOT_BYTES}")
