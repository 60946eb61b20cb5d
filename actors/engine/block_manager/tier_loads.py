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

import attrs

from ...messages.mover import Moved, MoveResult
from ...messages.peers import Peer
from ...messages.tiers import Tier
from .load_parts import EndedPart, Load, Loaded, LoadedPrompt, LoadPart, Stretch
from .move_outbox import MoveOutbox
from .pool_state import COMMITTED
from .pools import Pool
from .publications import Publications
from .tier_index import TierIndex
from .tier_search import TierSearch


class TierLoads:
    """All loads of one block manager."""

    def __init__(
        self,
        indexes: Mapping[Tier, TierIndex],
        pool: Pool,
        publications: Publications,
        block_size: int,
        outbox: MoveOutbox,
    ) -> None:
        """`indexes`: of each tier, the one to prefer first. Whoever owns the mapping may take tiers out of it."""
        self._indexes = indexes
        self.search = TierSearch(indexes)
        self._pool = pool
        self._publications = publications
        self._block_size = block_size
        self._outbox = outbox
        self._under_way: dict[int, Load] = {}
        """Loads by the number of each of their moves that is not over."""
        self._by_key: dict[bytes, Load] = {}
        self._loaded: dict[int, Loaded] = {}
        """Results by sequence, until the sequence ends or is preempted."""
        self._hurried: list[int] = []

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def num_held_ahead(self) -> int:
        """Blocks that are held for sequences that have not arrived."""
        return sum(len(load.table) for load in self._loads() if load.is_ahead)

    def tables(self) -> Iterator[list[int]]:
        """Yield the blocks that each load holds."""
        return (load.table for load in self._loads())

    def _loads(self) -> list[Load]:
        return list({id(load): load for load in self._under_way.values()}.values())

    # ------------------------------------------------------------ before

    def is_awaited(
        self, sequence_id: int, keys: list[bytes], num_found: int, limit: int, peer: Peer | None = None
    ) -> bool:
        """Return whether a candidate has to wait for a load in progress: its own, or one that brings its next block.

        `num_found` of its blocks are on the device, and at most `limit` may be reused. `peer`: the engine that computed
        it so far. Only a candidate that has one waits for blocks of a peer, which may still be computing them for
        another prompt.
        """
        load = self._by_key.get(keys[num_found]) if num_found < limit else None
        if load is not None and (peers := load.peer_moves):
            if peer is None:
                load = None
            else:
                self._hurried += peers
        if load is not None and load.epoch == self._publications.epoch:
            is_own = sequence_id == load.sequence_id and load.is_wanted  # its own may have been forgotten since
            if not is_own and sequence_id not in load.waiting_ids:
                load.waiting_ids.append(sequence_id)
            return True
        own = [load for load in self._under_way.values() if load.sequence_id == sequence_id and load.is_wanted]
        for load in own:
            self._hurried += load.peer_moves
        return bool(own)

    def peer_moves(self) -> list[int]:
        """Return the moves from peers that are under way."""
        return [i for load in self._loads() for i in load.peer_moves]

    def peer_moves_of(self, sequence_id: int) -> list[int]:
        """Return the moves from peers that are under way for a sequence."""
        return [i for load in self._loads() if load.sequence_id == sequence_id for i in load.peer_moves]

    def take_hurried(self) -> list[int]:
        """Return the moves from peers for which a sequence has begun to wait since the last call."""
        hurried, self._hurried = self._hurried, []
        return list(dict.fromkeys(hurried))

    def find(
        self, sequence_id: int, keys: list[bytes], first: int, limit: int, peer: Peer | None = None
    ) -> list[Stretch]:
        """Return what a sequence may load, from its block `first` on; empty if it has had a load already.

        `peer` is as for `is_awaited`.
        """
        before = self._loaded.get(sequence_id)
        if before is not None and not before.is_ahead:
            return []
        late = {
            (part.stretch.tier, part.stretch.peer)
            for number, load in self._under_way.items()
            if load.is_late and (part := load.parts[number]).num_loaded is None
        }
        stretches: list[Stretch] = []
        for stretch in self.search.find(keys, first, limit, peer):
            end = next((at for at, key in enumerate(stretch.keys) if key in self._by_key), len(stretch.keys))
            if (stretch.tier, stretch.peer) in late:
                break
            if end:
                stretches.append(attrs.evolve(stretch, keys=stretch.keys[:end]))
            if end < len(stretch.keys):
                break
        return stretches

    def begin(
        self,
        prompt: LoadedPrompt,
        stretches: list[Stretch],
        blocks: list[int],
        *,
        is_wanted: bool,
        is_ahead: bool = False,
    ) -> None:
        """Begin to load a prompt's next blocks into `blocks`. These and those that it shares are already held.

        `is_wanted`: its sequence waits for them, or will when it arrives. `is_ahead`: it has not arrived.
        """
        first = len(prompt.shared)
        parts: dict[int, LoadPart] = {}
        for stretch in stretches:
            index = self._indexes.get(stretch.tier)
            slots = [0] * len(stretch.keys) if index is None else index.read(stretch.keys)
            begin = stretch.first - first
            targets = blocks[begin : begin + len(slots)]
            waits = is_ahead and stretch.tier is Tier.PEER
            move = self._outbox.begin(
                stretch.tier, Tier.DEVICE, slots, targets, stretch.keys, stretch.peer, waits=waits
            )
            parts[move.number] = LoadPart(stretch, slots)
        load = Load(
            sequence_id=prompt.sequence_id,
            first=first,
            table=prompt.shared + blocks,
            keys=prompt.keys[first : first + len(blocks)],
            parts=parts,
            parent_key=prompt.keys[first - 1] if first else prompt.root_key,
            token_ids=prompt.token_ids,
            epoch=self._publications.epoch,
            is_wanted=is_wanted,
            is_ahead=is_ahead,
        )
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
            loaded = Loaded(load.first, blocks, tiers, is_short, load.is_ahead)
            before = self._loaded.get(load.sequence_id)
            self._loaded[load.sequence_id] = loaded if before is None else before.then(loaded)

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
