"""Loads from lower tiers: the sequences that wait for blocks, the blocks held for them, and the results.

Part of `lower_tiers.py`; `reservation.py` begins a load for a candidate whose cached prefix is longer in lower tiers
than on the device. The blocks of one load may lie in several tiers; each stretch from one tier is a move of its own,
and all are under way at the same time. Until the last is over, the blocks are held even if the sequence ends, since the
mover may still write to them. Then those that came can be found and all are released, so that the sequence is admitted
like any other. No sequence waits for a late load, and while one is under way no other begins in its tier, since that
tier does not respond.

What must always hold: a sequence begins at most one load before it is admitted; no key is loaded twice at a time; only
loaded blocks can be found, without a gap, and only in the epoch in which they were requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...messages.mover import Moved, MoveResult
from ...messages.tiers import Tier
from .load_parts import EndedPart, Load, Loaded, Stretch
from .pool_state import COMMITTED
from .pools import Pool
from .publications import Publications
from .tier_index import TierIndex


class TierLoads:
    """All loads of one block manager."""

    def __init__(
        self, indexes: Mapping[Tier, TierIndex], pool: Pool, publications: Publications, block_size: int
    ) -> None:
        """`indexes`: of each tier, the one to prefer first. Whoever owns the mapping may take tiers out of it."""
        self._indexes = indexes
        self._pool = pool
        self._publications = publications
        self._block_size = block_size
        self._under_way: dict[int, Load] = {}
        """Loads by the number of each of their moves that is not over."""
        self._by_key: dict[bytes, Load] = {}
        self._loaded: dict[int, Loaded] = {}
        """Results by sequence, until the sequence ends or is preempted."""

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def tables(self) -> Iterator[list[int]]:
        """Yield the blocks that each load holds."""
        return (load.table for load in self._loads())

    def _loads(self) -> list[Load]:
        return list({id(load): load for load in self._under_way.values()}.values())

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

    def find(self, sequence_id: int, keys: list[bytes], first: int, limit: int) -> list[Stretch]:
        """Return what a sequence may load, from its block `first` on; empty if it has had a load already."""
        if sequence_id in self._loaded:
            return []
        late = {
            part.stretch.tier
            for number, load in self._under_way.items()
            if load.is_late and (part := load.parts[number]).num_loaded is None
        }
        stretches: list[Stretch] = []
        for stretch in self.find_all(keys, first, limit):
            end = next((at for at, key in enumerate(stretch.keys) if key in self._by_key), len(stretch.keys))
            if stretch.tier in late:
                break
            if end:
                stretches.append(Stretch(stretch.tier, stretch.first, stretch.keys[:end]))
            if end < len(stretch.keys):
                break
        return stretches

    def find_all(self, keys: list[bytes], first: int, limit: int) -> Iterator[Stretch]:
        """Yield the consecutive blocks that are in any tier, from index `first` on and before `limit`."""
        begin, current = first, None
        for at in range(first, limit):
            tier = self._tier_of(keys[at])
            if tier is not current:
                if current is not None:
                    yield Stretch(current, begin, keys[begin:at])
                begin, current = at, tier
            if tier is None:
                return
        if current is not None:
            yield Stretch(current, begin, keys[begin:limit])

    def _tier_of(self, key: bytes) -> Tier | None:
        for tier, index in self._indexes.items():
            if index.holds(key):
                return tier
        return None

    def begin(self, load: Load) -> None:
        """Note a load whose moves have begun. Its blocks are already held."""
        self._under_way.update(dict.fromkeys(load.parts, load))
        self._by_key.update(dict.fromkeys(load.keys, load))

    def give_up(self, number: int) -> Load | None:
        """Stop waiting for the load of a move. Return the load; None if the move is over or was given up before."""
        load = self._under_way.get(number)
        if load is None or load.is_late:
            return None
        load.is_late = True
        self._forget_keys(load)
        if load.is_wanted:
            self._loaded[load.sequence_id] = Loaded(load.first, [], [], is_short=True)
        return load

    # ------------------------------------------------------------ after

    def end_part(self, number: int, result: MoveResult | None) -> EndedPart | None:
        """Note that a move of a load is over. `result` is None if it is abandoned.

        With the last one, the loaded blocks are published and all blocks are released. Returns None for a move that is
        no load, or is over.
        """
        load = self._under_way.pop(number, None)
        if load is None:
            return None
        part = load.parts[number]
        if result is None:
            part.num_loaded = 0
        elif isinstance(result, Moved):
            part.num_loaded = len(part.slots)
        else:
            part.num_loaded = _leading(result.moved)
        index = self._indexes.get(part.stretch.tier)
        if index is not None:
            index.end_read(part.slots)
        if load.is_over:
            self._end(load)
        return EndedPart(load, part)

    def _end(self, load: Load) -> None:
        self._forget_keys(load)
        is_void = load.is_abandoned or load.epoch != self._publications.epoch
        tiers = [] if is_void else load.tiers_loaded()
        blocks = load.table[load.first : load.first + len(tiers)]
        if blocks:
            self._publish(load, blocks)
        self._pool.release(load.table)
        if load.is_wanted:
            is_short = len(blocks) < len(load.keys)
            self._loaded[load.sequence_id] = Loaded(load.first, blocks, tiers, is_short)

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

    def is_short(self, sequence_id: int, num_found: int) -> bool:
        """Return whether a sequence's block `num_found` was asked for and did not come."""
        loaded = self._loaded.get(sequence_id)
        return loaded is not None and loaded.is_short and loaded.first + len(loaded.blocks) == num_found

    def spans(self, sequence_id: int, shared: Sequence[int]) -> dict[str, list[int]]:
        """Return by tier the positions in `shared` blocks that came from the sequence's own load: start, end, start…"""
        loaded = self._loaded.get(sequence_id)
        spans: dict[str, list[int]] = {}
        if loaded is None:
            return spans
        size = self._block_size
        own_blocks = zip(shared[loaded.first :], loaded.blocks, loaded.tiers, strict=False)
        for index, (block, own, tier) in enumerate(own_blocks, loaded.first):
            if block != own:
                continue
            ends = spans.setdefault(tier.value, [])
            if ends and ends[-1] == index * size:
                ends[-1] += size
            else:
                ends += (index * size, (index + 1) * size)
        return spans

    def forget(self, sequence_id: int) -> None:
        """Note that a sequence has ended or was preempted. A load in progress for it continues."""
        self._loaded.pop(sequence_id, None)
        for load in self._under_way.values():
            if load.sequence_id == sequence_id:
                load.is_wanted = False

    def abandon(self) -> None:
        """End all loads without their answers, and let nothing of them be found. No move may be in progress."""
        for load in self._loads():
            load.is_abandoned = True
        for number in list(self._under_way):
            self.end_part(number, None)
        self._loaded.clear()


def _leading(indexes: Sequence[int]) -> int:
    """Return the length of the gapless run of indexes that starts at 0."""
    return next((at for at, index in enumerate(indexes) if at != index), len(indexes))
