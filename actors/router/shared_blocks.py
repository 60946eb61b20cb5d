"""Which blocks are in the object store, as far as the engines have told: every engine can have them.

Used by `routing.py`, and by `dispatch.py` to tell an engine what others have found or stored. The indexes beside it are
of what each engine has of its own; what is here belongs to none of them, and outlives them. Engines that compute
different bits name blocks differently there, so they share only among themselves: a *group* is the engines of one
numerics, and what was told by any of them.

A set that is full makes room by forgetting what was told longest ago: its older half.

What must always hold: memory is bounded (16 MB for each group), and no call takes time in proportion to a prompt's
blocks, only to their logarithm; an engine is in one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import attrs

from ..messages.block_manager import LookUp
from ..messages.scheduler import Submit
from ..shared.digest_set import DigestSet
from .key_index import Match

MAX_KEYS = 2_000_000
"""Of a group: 32 million tokens in blocks of 16."""
MAX_GROUPS = 4
"""If there are more, those whose engines are all gone are forgotten."""

Prompt = TypeVar("Prompt", Submit, LookUp)


@attrs.define(eq=False)
class _Group:
    slots: int
    """A bit for each engine."""
    newer: DigestSet
    older: DigestSet

    def holds(self, key: bytes) -> bool:
        return key in self.newer or key in self.older


class SharedBlocks:
    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._half = max_keys // 2
        self._groups: dict[str, _Group] = {}
        """By numerics."""
        self._numerics: dict[int, str] = {}
        """By slot."""

    def add_engine(self, slot: int, numerics: str) -> None:
        self._numerics[slot] = numerics
        if (group := self._groups.get(numerics)) is not None:
            group.slots |= 1 << slot

    def remove_engine(self, slot: int) -> None:
        """Note that an engine is gone. What it has told of is still there."""
        group = self._groups.get(self._numerics.pop(slot, ""))
        if group is not None:
            group.slots &= ~(1 << slot)

    def move_engine(self, slot: int, new: int) -> None:
        numerics = self._numerics[slot]
        self.remove_engine(slot)
        self.add_engine(new, numerics)

    @property
    def is_in_use(self) -> bool:
        """Whether any engine has told of the object store."""
        return bool(self._groups)

    def add(self, slot: int, keys: Iterable[bytes]) -> None:
        """Note blocks that an engine has found or stored there."""
        group = self._group_of(slot)
        for key in keys:
            if group.newer.is_full:
                group.newer, group.older = DigestSet(self._half), group.newer
            group.newer.add(key)

    def discard(self, slot: int, keys: Iterable[bytes]) -> None:
        """Note blocks that an engine did not find there."""
        group = self._group_of(slot)
        for key in keys:
            group.newer.discard(key)
            group.older.discard(key)

    def _group_of(self, slot: int) -> _Group:
        numerics = self._numerics[slot]
        if (group := self._groups.get(numerics)) is None:
            if len(self._groups) >= MAX_GROUPS:
                self._groups = {its: group for its, group in self._groups.items() if group.slots}
            slots = sum(1 << other for other, its in self._numerics.items() if its == numerics)
            group = self._groups[numerics] = _Group(slots, DigestSet(self._half), DigestSet(self._half))
        return group

    def match(self, keys: Sequence[bytes]) -> list[Match]:
        """Return how many of the first `keys` each engine finds there; those that find none are left out."""
        numbers = ((group.slots, _num_leading(group, keys)) for group in self._groups.values() if group.slots)
        return [Match(num_blocks, slots) for slots, num_blocks in numbers if num_blocks]

    def hinted(self, message: Prompt, slot: int) -> Prompt:
        """Return a prompt that says how many of its first blocks an engine finds there."""
        group = self._groups.get(self._numerics[slot]) if self._groups and message.reads_cache else None
        num_blocks = 0 if group is None else _num_leading(group, message.block_keys)
        return (
            message if num_blocks == message.num_shared_blocks else attrs.evolve(message, num_shared_blocks=num_blocks)
        )

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def num_keys(self, slot: int) -> int:
        """Return how many keys are known to an engine's group, for checks."""
        group = self._groups.get(self._numerics[slot])
        return 0 if group is None else len(group.newer) + len(group.older)


def _num_leading(group: _Group, keys: Sequence[bytes]) -> int:
    """Search for the end of a prompt's blocks: they are stored from its beginning on."""
    if not keys or not group.holds(keys[0]):
        return 0
    low, high = 1, len(keys) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if group.holds(keys[middle - 1]):
            low = middle
        else:
            high = middle
    return low
