"""Stores values as bfloat16 if only products with bfloat16 matrices read them.

Such a product rounds its rows to bfloat16 first (`linear_bf16.cpp`). The result of attention or of an activation
function is often read by one product alone. Rounded when it is stored, it has half as many bytes, and the product reads
it unchanged. `recording.py` is the only caller.

What must always hold: a value is stored rounded only if each operation that reads it would round it; the bits of all
results are those of values stored as float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from . import program
from .packing import PANEL
from .recorded import Place, RecordedOp, Values

_BFLOAT16 = program.STORED[torch.bfloat16]
_ROUNDED_CACHES = frozenset(program.STORED_KV[dtype] for dtype in (torch.bfloat16, torch.int8))


def store_rounded(calls: Iterable[RecordedOp], values: Values) -> None:
    """Mark the operations that store their results as bfloat16, and those that read them."""
    writers: dict[int, list[RecordedOp]] = defaultdict(list)
    readers: dict[int, list[RecordedOp]] = defaultdict(list)
    for call in calls:
        for value in call.written:
            writers[value].append(call)
        for value in call.read:
            readers[value].append(call)
    for value in readers:
        place = Place(value, 0)
        if not all(call.y == place and _can_round(call) for call in writers[value]):
            continue
        if not all(
            call.x == place and call.read.count(value) == 1 and _rounds(call, values.widths[value])
            for call in readers[value]
        ):
            continue
        for call in writers[value]:
            call.fields["y_rounded"] = True
        for call in readers[value]:
            call.fields["x_rounded"] = True


def _can_round(call: RecordedOp) -> bool:
    """Return whether the kernel can round its result, which it does in whole panels."""
    fields = call.fields
    if call.kind == program.ATTEND:
        return fields["stored"] in _ROUNDED_CACHES and fields["width"] % PANEL == 0
    activated = call.kind == program.LINEAR and fields.get("activation")
    return bool(activated) and fields["stored"] == _BFLOAT16 and fields["out_width"] % (2 * PANEL) == 0


def _rounds(call: RecordedOp, width: int) -> bool:
    """Return whether the operation is a product that only reads its rows rounded to bfloat16."""
    fields = call.fields
    products = (program.LINEAR, program.LOW_RANK)
    is_product = call.kind in products and fields["stored"] == _BFLOAT16 and not fields.get("norm")
    return is_product and fields["width"] == width and width % PANEL == 0
