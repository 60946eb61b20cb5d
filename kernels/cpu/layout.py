"""Turns recorded calls into C structs: decides which barriers are needed, and allocates memory for values."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch

from . import program
from .program import Bounds, Op
from .recorded import Place, RecordedOp, Values

_LINE = 32
"""Number of bfloat16 elements in a cache line."""


def remove_barriers(calls: list[RecordedOp]) -> None:
    """Remove the barriers between operations in which each thread works on the same rows, between gathers, and between
    two products of the same rows."""
    for call, following in pairwise(calls):
        kinds = {call.kind, following.kind}
        same_rows = call.fields["on_logits_rows"] == following.fields["on_logits_rows"]
        call.fields["no_barrier"] = (kinds <= program.ROW_WISE and same_rows) or kinds == {program.GATHER}


def lay_out(
    calls: list[RecordedOp], values: Values, bounds: Bounds, kept: set[int], shared: Sequence[torch.Tensor] = ()
) -> dict[int, torch.Tensor]:
    """Allocate memory for every value; later values reuse the memory of those no longer read.

    Memory is not reused between operations without a barrier, because one thread could write its next row where another
    still reads. A product that adds a value for the last time stores its result in that value's place, which has just
    been read and is in the processor's cache. Values in `kept` are held until the end. `shared` is memory to use first.
    """
    rows = [bounds.num_logits if on_logits else bounds.num_tokens for on_logits in values.on_logits_rows]
    last_read = {value: index for index, call in enumerate(calls) for value in call.read}
    last_read |= dict.fromkeys(kept, len(calls))
    sizes: list[int] = []
    held_by: list[int | None] = []
    slot_of: dict[int, int] = {}
    for index, call in enumerate(calls):
        for value in call.written:
            if value in slot_of:  # logits, which both ways of running a program write
                continue
            replaced = _replaceable(call, values) if value == call.y.value else None
            if replaced is not None and last_read[replaced] == index:
                slot = slot_of[replaced]
            else:
                slot = _take(values.widths[value] * rows[value], sizes, held_by)
            held_by[slot] = value
            slot_of[value] = slot
        if call.fields["no_barrier"]:
            continue
        for slot, holder in enumerate(held_by):
            if holder is not None and last_read.get(holder, index) <= index:
                held_by[slot] = None
    memory = _allocate(sizes, shared)
    return {value: memory[slot] for value, slot in slot_of.items()}


def _allocate(sizes: list[int], shared: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory of at least these sizes: the largest gets the largest that is shared, and so on."""
    left = sorted(shared, key=len)
    memory: dict[int, torch.Tensor] = {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        fits = bool(left) and len(left[-1]) >= sizes[index]
        memory[index] = left.pop() if fits else torch.empty(sizes[index], dtype=torch.float32)
    return [memory[index] for index in range(len(sizes))]


def _replaceable(call: RecordedOp, values: Values) -> int | None:
    """Return the value in whose place a product may store its result, since it reads each element just before."""
    if call.kind != program.LINEAR or call.x is None or call.z is None or call.z.offset:
        return None
    added = call.z.value
    return added if added != call.x.value and values.shape(added) == values.shape(call.y.value) else None


def _take(size: int, sizes: list[int], held_by: list[int | None]) -> int:
    """Return the free slot that fits best, or a new one."""
    free = [slot for slot, holder in enumerate(held_by) if holder is None]
    if not free:
        sizes.append(size)
        held_by.append(None)
        return len(sizes) - 1
    slot = min(free, key=lambda slot: (max(size - sizes[slot], 0), abs(size - sizes[slot])))
    sizes[slot] = max(sizes[slot], size)
    return slot


def compile_op(call: RecordedOp, widths: list[int], memory: dict[int, torch.Tensor]) -> Op:
    op = Op(**call.fields)
    for name in ("x", "z", "y", "v", "scratch", "raw"):
        place = getattr(call, name)
        if place is not None:
            setattr(op, name, memory[place.value].data_ptr() + 4 * place.offset)
            if name in ("x", "z", "y"):
                rounded = bool(call.fields.get(f"{name}_rounded"))
                setattr(op, f"{name}_stride", _stride(widths[place.value], rounded=rounded))
    return op


def join_heads(ops: ctypes.Array[Op], calls: Sequence[RecordedOp]) -> None:
    """Let each product of the heads of queries, keys and values, and the attention that alone reads them, know each
    other. For many rows the product gives them to attention itself (`heads_are_taken` in csrc/program.h)."""
    readers = Counter(value for call in calls for value in call.read)
    for index, (product, attend) in enumerate(pairwise(calls)):
        if attend.kind == program.ATTEND and _makes_heads(product, attend) and readers[product.y.value] == 3:
            ops[index].joined, ops[index + 1].joined = ctypes.addressof(ops[index + 1]), ctypes.addressof(ops[index])


def _makes_heads(product: RecordedOp, attend: RecordedOp) -> bool:
    width, num_heads, num_kv_heads = (attend.fields[name] for name in ("width", "num_heads", "num_kv_heads"))
    value = product.y.value
    places = [Place(value, 0), Place(value, num_heads * width), Place(value, (num_heads + num_kv_heads) * width)]
    return (
        product.kind == program.LINEAR
        and product.z is None
        and bool(attend.fields.get("fused_rope"))
        and [attend.x, attend.z, attend.v] == places
        and product.fields["out_width"] == (num_heads + 2 * num_kv_heads) * width
    )


def _stride(width: int, *, rounded: bool) -> int:
    """Return the distance between rows in elements.

    Rounded rows, which have twice the memory that they need, are an odd number of cache lines apart, so that they do
    not all map to a few cache sets.
    """
    return (width // _LINE | 1) * _LINE if rounded and width % _LINE == 0 and width > _LINE else width
