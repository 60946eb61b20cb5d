"""Loads from the host tier: the sequences that wait for blocks, the blocks held for them, and the results.

Part of `host_tier.py`; `reservation.py` begins a load for a candidate whose cached prefix is longer on the host than on
the device. Until the load is over, its blocks are held even if the sequence ends, since the mover may still write to
them. Then the loaded blocks can be found and all are released, so that the sequence is admitted like any other. No
sequence waits for a late load, and while one is in progress no other begins, since the tier does not respond.

What must always hold: a sequence begins at most one load before it is admitted; no key is loaded twice at a time; only
loaded blocks can be found, and only in the epoch in which they were requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ...messages.mover import Moved, MoveResult
from ...messages.tiers import Tier, TierSpans
from .host_index import HostIndex
from .pool_state import COMMITTED
from .pools import Pool
from .publications import Publications


@attrs.define(eq=False)
class Load:
    """Blocks that are being loaded to the device for one sequence."""

    sequence_id: int
    first: int
    """Index of the first one in its table; the blocks before it were found on the device, and are held as well."""
    table: list[int]
    keys: list[bytes]
    """Keys of the blocks from `first` on."""
    slots: list[int]
    parent_key: bytes
    token_ids: list[int]
    epoch: int
    is_wanted: bool = True
    """Whether the sequence waits for it."""
    is_late: bool = False
    waiting_ids: list[int] = attrs.field(factory=list)
    """Other sequences that wait for these blocks."""

    def take_waiting(self) -> tuple[int, ...]:
        """Return all sequences that have been waiting for it; from now on none is."""
        own = (self.sequence_id,) if self.is_wanted else ()
        others, self.waiting_ids, self.is_wanted = self.waiting_ids, [], False
        return (*own, *others)


@attrs.frozen
class Loaded:
    """The result of a load."""

    first: int
    blocks: list[int]
    """Loaded blocks, from index `first` of the table on."""


class HostLoads:
    """All loads of one block manager."""

    def __init__(self, index: HostIndex, pool: Pool, publications: Publications, block_size: int) -> None:
        self._index = index
        self._pool = pool
        self._publications = publications
        self._block_size = block_size
        self._under_way: dict[int, Load] = {}
        """Loads in progress, by the number of the move."""
        self._by_key: dict[bytes, Load] = {}
        self._loaded: dict[int, Loaded] = {}
        """Results by sequence, until the sequence ends or is preempted."""

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def tables(self) -> Iterator[list[int]]:
        """Yield the blocks that each load holds."""
        return (load.table for load in self._under_way.values())

    # ------------------------------------------------------------ before

    def is_awaited(self, sequence_id: int, keys: list[bytes], num_found: int, limit: int) -> bool:
        """Return whether a candidate has to wait for a load in progress: its own, or one that brings its next block.

        `num_found` of its blocks are on the device, and at most `limit` may be reused.
        """
        load = self._by_key.get(keys[num_found]) if num_found < limit else None
        if load is not None and load.epoch == self._publications.epoch:
            if sequence_id != load.sequence_id and sequence_id not in load.waiting_ids:
                load.waiting_ids.append(sequence_id)
            return True
        return any(load.sequence_id == sequence_id and load.is_wanted for load in self._under_way.values())

    def num_found(self, sequence_id: int, keys: list[bytes], first: int, limit: int) -> int:
        """Return the number of blocks from index `first` on that a sequence may load; 0 if it has had a load already,
        or while a load is late.
        """
        if sequence_id in self._loaded or any(load.is_late for load in self._under_way.values()):
            return 0
        end = first + self.num_on_host(keys, first, limit)
        return next((at for at in range(first, end) if keys[at] in self._by_key), end) - first

    def num_on_host(self, keys: list[bytes], first: int, limit: int) -> int:
        """Return the number of consecutive blocks on the host from index `first` on, and before `limit`."""
        end = first
        while end < limit and self._index.holds(keys[end]):
            end += 1
        return end - first

    def begin(self, number: int, load: Load) -> None:
        """Note a load that move `number` carries out. Its blocks are already held."""
        self._under_way[number] = load
        self._by_key.update(dict.fromkeys(load.keys, load))

    def give_up(self, number: int) -> Load | None:
        """Stop waiting for a load. Return the load; None if it is over or was given up before."""
        load = self._under_way.get(number)
        if load is None or load.is_late:
            return None
        load.is_late = True
        self._forget_keys(load)
        if load.is_wanted:
            self._loaded[load.sequence_id] = Loaded(load.first, [])
        return load

    # ------------------------------------------------------------ after

    def end(self, number: int, result: MoveResult | None) -> Load | None:
        """Publish the loaded blocks and release all blocks. `result` is None if the outcome will never be known.

        Return the load; None if it has already been ended.
        """
        load = self._under_way.pop(number, None)
        if load is None:
            return None
        self._forget_keys(load)
        self._index.end_read(load.slots)
        blocks = load.table[load.first :]
        if result is None:
            blocks = []
        elif not isinstance(result, Moved):
            blocks = blocks[: _leading(result.moved)]
        if load.epoch != self._publications.epoch:
            blocks = []
        if blocks:
            self._publish(load, blocks)
        self._pool.release(load.table)
        if load.is_wanted:
            self._loaded[load.sequence_id] = Loaded(load.first, blocks)
        return load

    def _forget_keys(self, load: Load) -> None:
        for key in load.keys:
            if self._by_key.get(key) is load:
                del self._by_key[key]

    def _publish(self, load: Load, blocks: list[int]) -> None:
        """Let blocks be found, except for those whose keys were computed in the meantime."""
        keys = load.keys[: len(blocks)]
        is_all = self._pool.publish(blocks, keys, COMMITTED)
        runs = [(0, len(blocks))] if is_all else [(i, i + 1) for i in range(len(blocks))]
        for begin, end in runs:
            if not is_all and self._pool.match(keys[begin:end], 1) != blocks[begin:end]:
                continue
            parent_key = keys[begin - 1] if begin else load.parent_key
            block_index = load.first + begin
            for observer in self._pool.observers:
                observer.on_stored(
                    keys[begin:end], parent_key, load.token_ids, block_index * self._block_size, block_index
                )

    def spans(self, sequence_id: int, shared: Sequence[int]) -> TierSpans:
        """Return the positions in `shared` blocks that came from the sequence's own load."""
        loaded = self._loaded.get(sequence_id)
        ends: list[int] = []
        if loaded is not None:
            for index, (block, own) in enumerate(
                zip(shared[loaded.first :], loaded.blocks, strict=False), loaded.first
            ):
                if block != own:
                    continue
                if ends and ends[-1] == index:
                    ends[-1] = index + 1
                else:
                    ends += (index, index + 1)
        return {Tier.HOST.value: [end * self._block_size for end in ends]} if ends else {}

    def forget(self, sequence_id: int) -> None:
        """Note that a sequence has ended or was preempted. A load in progress for it continues."""
        self._loaded.pop(sequence_id, None)
        for load in self._under_way.values():
            if load.sequence_id == sequence_id:
                load.is_wanted = False

    def abandon(self) -> None:
        """End all loads without their answers. No move may be in progress."""
        for number in list(self._under_way):
            self.end(number, None)
        self._loaded.clear()


def _leading(indexes: Sequence[int]) -> int:
    """Return the length of the gapless run of indexes that starts at 0."""
    return next((at for at, index in enumerate(indexes) if at != index), len(indexes))
