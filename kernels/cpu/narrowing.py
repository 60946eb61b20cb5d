"""Narrows the operations after the last layer's attention to the rows that are sampled from.

A step needs the keys and values of all its tokens, but few logits: for a prompt, only those of the last token. After
the last attention, no row reads another row's results. So these operations can run on the sampled rows alone, which are
gathered before them instead of before the head. The last attention does not need the queries of other rows, either. For
a model of L layers this saves most of 1/L of a prefill. `recording.py` is the only caller.

What must always hold: each operation after the last attention is row-wise; the bits are the same as for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from . import program
from .recorded import Place, RecordedOp, Values


def through_last_attention(trunk: Sequence[RecordedOp]) -> list[RecordedOp]:
    """Return the operations up to the last attention, which writes all keys, but computes only sampled rows."""
    attends = [index for index, call in enumerate(trunk) if call.kind == program.ATTEND]
    if not attends:
        return list(trunk)
    last = trunk[attends[-1]]
    before = [_without_unread_queries(call, last, trunk) for call in trunk[: attends[-1]]]
    return [*before, _with(last, on_logits_rows=True)]


def _without_unread_queries(call: RecordedOp, attend: RecordedOp, trunk: Sequence[RecordedOp]) -> RecordedOp:
    """Limit a product of this attention's queries, keys and values to the queries that are read; return other calls
    unchanged.

    If attention rotates keys itself, keys and values come from the same product, after the queries.
    """
    others = [other for other in trunk if other is not attend and call.y.value in other.read]
    if call.kind != program.LINEAR or attend.x != call.y or others or not attend.fields.get("fused_rope"):
        return call
    queries = attend.fields["num_heads"] * attend.fields["width"]
    follow = all(place is not None and place.offset >= queries for place in (attend.z, attend.v))
    return _with(call, drawn_columns=queries) if follow else call


def _with(call: RecordedOp, **fields: int) -> RecordedOp:
    return attrs.evolve(call, fields={**call.fields, **fields})


def narrowed(calls: Sequence[RecordedOp], result: int, values: Values) -> list[RecordedOp]:
    """Return the operations after the last attention, including those of the head, on the sampled rows.

    `result`: the value that the last of them writes, shared by both ways of running, since logits need much memory.
    """
    ours: dict[int, int] = {result: result}
    gathers: list[RecordedOp] = []
    narrow: list[RecordedOp] = []

    def gathered(value: int) -> int:
        if value not in ours:
            width = values.widths[value]
            ours[value] = values.add(width, on_logits_rows=True)
            fields = {"kind": program.GATHER, "on_logits_rows": True, "no_barrier": False, "width": width}
            gathers.append(RecordedOp(fields, Place(value, 0), None, Place(ours[value], 0)))
        return ours[value]

    def made(value: int) -> int:
        if value not in ours:
            ours[value] = values.add(values.widths[value], on_logits_rows=True)
        return ours[value]

    def moved(place: Place | None, move: Callable[[int], int]) -> Place | None:
        return None if place is None else Place(move(place.value), place.offset)

    for call in calls:
        if call.kind == program.GATHER:  # the head's gather: its rows are already gathered
            ours[call.y.value] = gathered(call.read[0])
            continue
        narrow.append(
            RecordedOp(
                {**call.fields, "on_logits_rows": True},
                x=moved(call.x, gathered),
                z=moved(call.z, gathered),
                v=moved(call.v, gathered),
                y=Place(made(call.y.value), call.y.offset),
                scratch=moved(call.scratch, made),
                raw=moved(call.raw, made),
            )
        )
    return [*gathers, *narrow]
