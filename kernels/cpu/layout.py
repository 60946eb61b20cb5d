"""Notes become operations: where threads need not wait, what memory each value has, and the C structs.

`recorder.py` is the only caller.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from . import program
from .notes import Note
from .program import Op


def join(notes: list[Note]) -> None:
    """Spare threads the wait between operations that work on the same rows."""
    for note, following in pairwise(notes):
        kinds = {note.kind, following.kind}
        same_rows = note.fields["looked_at"] == following.fields["looked_at"]
        note.fields["joined"] = kinds <= program.ROW_WISE and same_rows


def lay_out(notes: list[Note], widths: list[int], rows: list[int]) -> dict[int, torch.Tensor]:
    """Memory for every value; values that are done with make room for later ones.

    Not while operations are joined: one thread's next row would lie where another still reads its last. And the last
    value of the trunk is kept: the head may be run again for other tokens.
    """
    last_read = {value: index for index, note in enumerate(notes) for value in note.read}
    for note in notes:
        if note.kind == program.GATHER:
            last_read[note.read[0]] = len(notes)
    last_read[notes[-1].y.value] = len(notes)
    sizes: list[int] = []
    held_by: list[int | None] = []
    room: dict[int, int] = {}
    for index, note in enumerate(notes):
        for value in note.written:
            slot = _take(widths[value] * rows[value], sizes, held_by)
            held_by[slot] = value
            room[value] = slot
        if note.fields["joined"]:
            continue
        for slot, holder in enumerate(held_by):
            if holder is not None and last_read.get(holder, index) <= index:
                held_by[slot] = None
    memory = [torch.empty(size, dtype=torch.float32) for size in sizes]
    return {value: memory[slot] for value, slot in room.items()}


def _take(size: int, sizes: list[int], held_by: list[int | None]) -> int:
    """The slot that nobody holds and that fits best, or a new one."""
    free = [slot for slot, holder in enumerate(held_by) if holder is None]
    if not free:
        sizes.append(size)
        held_by.append(None)
        return len(sizes) - 1
    slot = min(free, key=lambda slot: (max(size - sizes[slot], 0), abs(size - sizes[slot])))
    sizes[slot] = max(sizes[slot], size)
    return slot


def compile_note(note: Note, widths: list[int], memory: dict[int, torch.Tensor]) -> Op:
    op = Op(**note.fields)
    for name in ("x", "z", "y", "v", "room", "raw"):
        place = getattr(note, name)
        if place is not None:
            setattr(op, name, memory[place.value].data_ptr() + 4 * place.offset)
            if name in ("x", "z", "y"):
                setattr(op, f"{name}_stride", widths[place.value])
    return op
