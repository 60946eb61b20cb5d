"""A block manager with a disk, or an object store, whose moves a test ends. Blocks are of 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec.structs import replace

from quipu.actors.engine.block_manager.host_index import HostIndex
from quipu.actors.engine.block_manager.load_costs import LoadCosts
from quipu.actors.engine.block_manager.lower_tier import LowerTier, TierPlan
from quipu.actors.engine.block_manager.object_index import ObjectIndex
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.engine.block_manager.segment_index import SegmentIndex, StoredLog
from quipu.actors.engine.block_manager.write_behind import StorePolicy, WriteBehind
from quipu.actors.messages.mover import Move, Moved, MoveFailed
from quipu.actors.messages.scheduler import Granted
from quipu.actors.messages.tiers import Tier
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import Candidate, keys_of, reserve

SIZE = 4
PROMPT = list(range(1, 14))
"""Three full blocks, and a token."""
KEYS = keys_of("a", PROMPT, SIZE)
OTHER = [9] * 13


@attrs.define
class Managed:
    """A block manager whose steps all succeed at once."""

    manager: BlockManager
    step: int = 0
    tiers: dict[Tier, LowerTier] = attrs.field(factory=dict)
    now: float = 0.0

    def grant(self, *candidates: Candidate, reset: bool = False, shared: Sequence[bytes] = ()) -> Granted:
        """Grant a step for candidates, after the last one is committed and its sequences have ended."""
        ended = list(self.manager.allocations)
        self.step += 1
        committed = [self.step - 1] if self.step > 1 else []
        asked = reserve(self.step, SIZE, committed=committed, free=ended, candidates=candidates, reset=reset)
        granted = self.manager.grant(replace(asked, shared_keys=list(shared)), self.now)
        check_manager(self.manager)
        return granted

    def moves(self) -> list[Move]:
        assert self.manager.tiers is not None
        return [move for move in self.manager.tiers.take_moves() if isinstance(move, Move)]

    def end(self, move: Move, result: Moved | MoveFailed | None = None) -> tuple[int, ...]:
        """End a move. Return the sequences that need wait no longer."""
        assert self.manager.tiers is not None
        over = self.manager.tiers.end_move(result or Moved(move.number))
        check_manager(self.manager)
        return () if over is None else over.sequence_ids

    def end_all(self) -> None:
        while moves := self.moves():
            for move in moves:
                self.end(move)


def managed(
    num_blocks: int = 9,
    *,
    host: int = 0,
    policy: StorePolicy = StorePolicy.ALL,
    log: StoredLog | None = None,
    costs: LoadCosts | None = None,
    objects: ObjectIndex | None = None,
) -> Managed:
    index = SegmentIndex(4, 4, log)
    tiers = [LowerTier(Tier.HOST, HostIndex(host))] if host else []
    tiers.append(LowerTier(Tier.DISK, index, WriteBehind(index, policy, 100)))
    if objects is not None:
        tiers = [LowerTier(Tier.REMOTE, objects, WriteBehind(objects, policy, 100), is_local=False)]
    plan = TierPlan(tiers, num_stored_ahead=2 if host else 0, costs=costs)
    manager = BlockManager(num_blocks, SIZE, tiers=plan)
    return Managed(manager, tiers={tier.tier: tier for tier in tiers})
