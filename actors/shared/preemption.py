"""Preemption: when blocks run out, whose are taken, and how the sequences that lost them are resumed.

The scheduler decides whom before it asks (`scheduler/running.py`, `scheduler/planning.py`); the block manager, which
alone knows what is free, takes the blocks (`block_manager/reservation.py`). Both follow this file.

    when    a row needs more blocks than are free, and none is held by pins alone; an admission never preempts, and
            leaves a watermark of free blocks while other sequences run, so that those can grow for a while
    whom    the sequence of worst rank, then the next; never one that this step has served
    how     its blocks are released; it returns to the queue with its known tokens, and what is no longer cached by
            then is computed again

What must always hold: no sequence loses its blocks in favour of one of worse rank; a sequence that has the engine to
itself is never preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, TypeVar


class Preemptible(Protocol):
    """The part of a sequence that preemption needs."""

    id: int
    next_start: int
    num_slots: int


S = TypeVar("S", bound=Preemptible)
Rank = Callable[[S], Any]
"""What orders sequences: the lower, the later preempted."""


def may_run_out(rows: Iterable[Preemptible], ends: Iterable[int], block_size: int, num_free_blocks: int) -> bool:
    """Return whether the rows of a step, each up to its end, may need more blocks than are free."""
    missing = 0
    for row, end in zip(rows, ends, strict=True):
        missing += max(0, -(-(end - row.num_slots) // block_size))
    return missing > num_free_blocks


def victims(running: Iterable[S], rank: Rank[S]) -> list[int]:
    """Return all sequences in the order in which they lose their blocks."""
    return [s.id for s in sorted(running, key=rank, reverse=True)]


def in_order_of_service(rows: Iterable[tuple[S, int]], rank: Rank[S]) -> list[tuple[S, int]]:
    """Return rows, each with its count, in order of rank: one that was served is not preempted in the same step."""
    return sorted(rows, key=lambda row: rank(row[0]))


def next_victims(order: Iterator[int], requesting: int, served: Collection[int]) -> Iterator[int]:
    """Yield whom to preempt for `requesting`, which comes last if nobody is left."""
    for victim in order:
        if victim not in served:
            yield victim
            if victim == requesting:
                return
    yield requesting
