"""The kernels' input: a list of operations, and the columns of a pass. The Python side of csrc/program.h.

`recording.py` makes a program once; `cpu_backend.py` makes a pass for each step and runs both in one call.

What must always hold: fields have the names and offsets of the C structs (`check_layout` compares them at load); memory
that a pointer refers to lives as long as the struct that holds the pointer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain, zip_longest

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ..batch import StepBatch

STORED = {torch.float32: 0, torch.bfloat16: 1}
"""Supported dtypes of weights."""
QUANTIZED = 2
"""`Op.stored` of a weight that is a `QuantizedMatrix`."""
STORED_KV = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}
"""Supported dtypes of caches."""

EMBED, GATHER, LINEAR, RMS_NORM, ROPE, WRITE_KV, ATTEND, SILU_MUL, ADD = range(9)
GELU_MUL, SOFT_CAP, ROUTE, DISPATCH, EXPERT_LINEAR, EXPERT_SILU_MUL, COMBINE = range(9, 16)
LOW_RANK, SIGMOID_MUL, NORM_LATENT, HEAD_LINEAR, LAYER_NORM, GELU, MUL = range(16, 23)
SPARSE_GELU_MUL, MATCH_COPIES, MIX_COPIES = range(23, 26)
ROW_WISE = frozenset(
    {RMS_NORM, ROPE, WRITE_KV, SILU_MUL, ADD, EMBED, GELU_MUL, SOFT_CAP, ROUTE, COMBINE, SIGMOID_MUL}
    | {NORM_LATENT, LAYER_NORM, GELU, MUL, SPARSE_GELU_MUL, MATCH_COPIES, MIX_COPIES}
)
"""Kinds of operations in which each thread reads and writes only its own rows, always the same ones."""

Int64s = npt.NDArray[np.int64]


class Op(ctypes.Structure):
    """One operation; csrc/program.h documents the fields."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "on_logits_rows", "stored", "no_barrier")),
        *((name, ctypes.c_int64) for name in ("width", "out_width", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride", "z_stride")),
        *(
            (name, ctypes.c_int64)
            for name in ("window", "num_experts", "num_chosen", "num_groups", "num_chosen_groups")
        ),
        *((name, ctypes.c_int64) for name in ("first", "num_multiplied", "narrow_stride", "drawn_columns")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "soft_cap")),
        *((name, ctypes.c_int32) for name in ("normalise", "activation", "fused_rope", "x_rounded", "y_rounded")),
        *((name, ctypes.c_int32) for name in ("interleaved", "in_chunks", "by_score")),
        *((name, ctypes.c_void_p) for name in ("x", "z", "weight", "bias", "cos", "sin", "y", "keys", "values")),
        *(
            (name, ctypes.c_void_p)
            for name in ("matrices", "dispatch", "norm", "key_norm", "v", "scratch", "raw", "pass", "joined")
        ),
    )


class QuantizedMatrix(ctypes.Structure):
    """A quantized matrix; csrc/linear/quantized.h documents the fields."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "group_size", "num_groups")),
        *((name, ctypes.c_int32) for name in ("bits", "halves", "byte_products", "has_lowest", "e2m1")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")),
    )


class LowRankPart(ctypes.Structure):
    """Some columns of such a product; csrc/linear/low_rank.h documents the fields."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first_panel", "num_panels", "first", "rank", "place")),
        ("b", ctypes.c_void_p),
    )


class LowRankMatrices(ctypes.Structure):
    """An adapter's part of a product; csrc/linear/low_rank.h documents the fields."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_vecs", "num_parts", "stored")),
        *((name, ctypes.c_void_p) for name in ("a", "parts")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("num_tokens", "num_logits", "num_sequences", "block_size", "num_threads")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "token_ids", "positions", "blocks", "logits_indices", "query_start", "tables", "table_start",
                "adapted_tokens", "adapted_starts", "adapted_logits", "adapted_logits_starts",
            )
        ),
        ("num_adapters", ctypes.c_int64),
    )  # fmt: skip


@attrs.frozen
class Bounds:
    """The bounds for which the kernels' memory was allocated. Kernels do not check them; `Pass` does."""

    num_tokens: int
    num_logits: int
    num_blocks: int
    num_positions: int
    vocab_size: int


@attrs.frozen
class RowAdapters:
    """The adapter of each row of a pass."""

    slots: list[int]
    """The slot of each row's adapter, or -1."""
    num_slots: int


class Pass:
    """The columns of one pass, and the C struct that points to them."""

    def __init__(
        self,
        batch: StepBatch,
        last_drawn: Sequence[int | None],
        *,
        bounds: Bounds,
        block_size: int,
        num_threads: int,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Raise ValueError as `StepBatch.inputs`, and for anything out of bounds."""
        self._bounds = bounds
        token_ids = _column(batch.inputs(last_drawn))
        query_start, first_position = _column(batch.query_start), _column(batch.positions)
        lengths = np.diff(query_start)
        positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(first_position - query_start[:-1], lengths)
        tables = np.fromiter(chain.from_iterable(batch.block_tables), np.int64)
        table_start = _column([0, *accumulate(map(len, batch.block_tables))])
        self._check(token_ids, positions, tables, np.diff(table_start) * block_size - (first_position + lengths))
        blocks = tables[np.repeat(table_start[:-1], lengths) + positions // block_size]
        self._columns = {
            "token_ids": token_ids,
            "positions": positions,
            "blocks": blocks,
            "query_start": query_start,
            "tables": tables,
            "table_start": table_start,
        }
        self._token_slots: Int64s | None = None
        if adapters is not None:
            self._token_slots = np.repeat(_column(adapters.slots), lengths)
            self._columns |= _sorted_by_slot("adapted_tokens", "adapted_starts", self._token_slots, adapters.num_slots)
        self._struct = _Pass(
            num_adapters=0 if adapters is None else adapters.num_slots,
            num_tokens=len(token_ids),
            num_sequences=len(batch.slots),
            block_size=block_size,
            num_threads=num_threads,
            **{name: column.ctypes.data for name, column in self._columns.items()},
        )

    @property
    def has_adapters(self) -> bool:
        return self._token_slots is not None

    def run(self, library: ctypes.CDLL, ops: ctypes.Array[Op], logits_indices: Sequence[int]) -> None:
        """Run operations, those of the head for the tokens with these indexes."""
        column = _column(logits_indices)
        _check_within("logits index", column, len(self._columns["token_ids"]))
        if len(column) > self._bounds.num_logits:
            raise ValueError(
                f"logits of {len(column)} tokens requested, at most {self._bounds.num_logits} are possible"
            )
        self._struct.logits_indices, self._struct.num_logits = column.ctypes.data, len(column)
        if self._token_slots is not None:
            slots = self._token_slots[column]
            columns = _sorted_by_slot("adapted_logits", "adapted_logits_starts", slots, self._struct.num_adapters)
            self._columns |= columns  # which keeps their memory
            for name, values in columns.items():
                setattr(self._struct, name, values.ctypes.data)
        library.quipu_run(ops, len(ops), ctypes.byref(self._struct))

    def _check(self, token_ids: Int64s, positions: Int64s, tables: Int64s, num_free_slots: Int64s) -> None:
        if len(token_ids) > self._bounds.num_tokens:
            raise ValueError(f"{len(token_ids)} tokens in a pass, where at most {self._bounds.num_tokens} are possible")
        _check_within("token id", token_ids, self._bounds.vocab_size)
        _check_within("position", positions, self._bounds.num_positions)
        _check_within("block", tables, self._bounds.num_blocks)
        if len(num_free_slots) and num_free_slots.min() < 0:
            raise ValueError(f"the block table of row {num_free_slots.argmin()} ends before its last token")


class _Field(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


@attrs.frozen
class Field:
    """A field of a struct, in bytes; the last entry has no name and marks the end of the struct."""

    name: str
    offset: int
    size: int


def fields_of(struct: type[ctypes.Structure]) -> list[Field]:
    places = [(name, getattr(struct, name)) for name, *_ in struct._fields_]
    return [*(Field(name, place.offset, place.size) for name, place in places), Field("", ctypes.sizeof(struct), 0)]


def check_layout(
    library: ctypes.CDLL,
    structs: Sequence[type[ctypes.Structure]] = (Op, _Pass, QuantizedMatrix, LowRankMatrices, LowRankPart),
) -> None:
    """Raise RuntimeError with the name of the first field that differs between these structs and the compiled ones."""
    for which, struct in enumerate(structs):
        for ours, theirs in zip_longest(fields_of(struct), _compiled_fields(library, which)):
            if ours != theirs:
                raise RuntimeError(
                    "kernels/cpu/program.py and csrc/program.h disagree about their structs: "
                    f"{struct.__name__} has {ours} in Python and {theirs} in C++"
                )


def _compiled_fields(library: ctypes.CDLL, which: int) -> list[Field]:
    table = ctypes.cast(library.quipu_layout(which), ctypes.POINTER(_Field))
    fields: list[Field] = []
    while not fields or fields[-1].name:
        raw = table[len(fields)]
        fields.append(Field((raw.name or b"").decode(), raw.offset, raw.size))
    return fields


def _column(values: Sequence[int]) -> Int64s:
    return np.array(values, dtype=np.int64)


def _sorted_by_slot(rows: str, starts: str, slots: Int64s, num_slots: int) -> dict[str, Int64s]:
    """Return the numbers of all rows, those without an adapter (-1) first, and where those of each slot begin."""
    order = np.argsort(slots, kind="stable").astype(np.int64, copy=False)
    return {rows: order, starts: np.searchsorted(slots[order], np.arange(num_slots + 1)).astype(np.int64, copy=False)}


def _check_within(what: str, column: Int64s, bound: int) -> None:
    if len(column) and not (column.min() >= 0 and column.max() < bound):
        raise ValueError(f"{what} {column.min()} or {column.max()} is outside of 0 to {bound - 1}")
