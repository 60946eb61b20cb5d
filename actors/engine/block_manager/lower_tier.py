"""One tier below the device, as the KV-block manager sees it: its index, queue and store, and what happened in it.

Part of `lower_tiers.py`, which decides. Made by the engine.

What must always hold: what happened is reported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from ...messages.mover import ClearTier, Move, Moved, MoveResult, TierCleared
from ...messages.tiers import LoadFailure, Tier, TierReport
from ...shared.block_observer import BlockObserver
from .load_costs import LoadCosts
from .tenant_quotas import TierQuota
from .tier_index import TierIndex
from .tier_pins import TierPins
from .write_behind import WriteBehind


@attrs.frozen
class Store:
    """A move to a lower tier that is in progress."""

    move: Move
    epoch: int


@attrs.define(eq=False)
class LowerTier:
    """A tier of one block manager."""

    tier: Tier
    index: TierIndex
    queue: WriteBehind | None = None
    """What is to be stored; None: blocks come here when they are about to be evicted from the device."""
    is_local: bool = True
    """Whether it is this engine's own: otherwise others store there, too, a reset leaves it as it is, and observers are
    not told what it holds."""
    is_on: bool = True
    """False once its memory has failed."""
    pins: TierPins = attrs.field(
        default=attrs.Factory(lambda self: TierPins(self.index.num_slots - self.num_unpinned), takes_self=True)
    )
    quota: TierQuota | None = None
    """Set by `lower_tiers.py`, if tenants have one."""
    store: Store | None = None
    """The store that is under way."""
    happened: Counter[str] = attrs.field(factory=Counter)
    """Blocks stored, loaded and evicted since the last report."""
    failed_loads: Counter[str] = attrs.field(factory=Counter)
    num_clearing: int = 0
    """Clearings of its memory that are not answered..."""
    is_uncleared: bool = False
    """...and whether the last that was has failed."""
    _told: tuple[int, int, bool] = (-1, -1, False)

    def clear(self) -> None:
        """Forget all blocks and what is said about them, because the cache is being reset."""
        self.index.clear()
        self.pins.clear()
        if self.quota is not None:
            self.quota.clear()
        self.num_clearing += 1

    def on_cleared(self, cleared: TierCleared) -> None:
        """Note what has become of a clearing of its memory, which the next report tells."""
        self.num_clearing -= 1
        self.is_uncleared = cleared.has_failed

    def clear_again(self) -> list[ClearTier]:
        """Return what replaces the clearings that are not answered, and will not be."""
        self.num_clearing = min(1, self.num_clearing)
        return [ClearTier(self.tier)] * self.num_clearing

    def __attrs_post_init__(self) -> None:
        self.index.is_kept = self.pins.is_pinned

    @property
    def num_unpinned(self) -> int:
        """Slots that pins leave to other blocks: half of them."""
        return -(-self.index.num_slots // 2)

    def note_new(self, keys: list[bytes], observers: Sequence[BlockObserver]) -> bool:
        """Note that blocks can be found here from now on. Return whether a quota has had any leave for them."""
        for observer in observers if self.is_local else ():
            observer.on_stored(keys, b"", [], 0, 0, tier=self.tier)
        leaving = [] if self.quota is None else self.quota.add(keys)
        self.drop(leaving, observers)
        return bool(leaving)

    def drop(self, keys: list[bytes], observers: Sequence[BlockObserver]) -> None:
        """Forget blocks that can be found here."""
        for key in keys:
            slot = self.index.slot_of(key)
            if slot is not None:
                self.index.drop(key, slot)
        self.note_evicted(keys, observers)

    def on_found(self, keys: list[bytes]) -> None:
        """Note that a prompt has found these blocks on the device, whether they lie here or not."""
        self.pins.refresh(keys)
        if self.queue is not None:
            self.queue.on_found(keys)
        if self.quota is not None:
            self.quota.touch(keys)

    def note_evicted(self, keys: list[bytes], observers: Sequence[BlockObserver]) -> None:
        """Note that blocks cannot be found here any more."""
        if keys:
            if self.quota is not None:
                self.quota.discard(keys)
            self.happened["evicted"] += len(keys)
            for observer in observers if self.is_local else ():
                observer.on_removed(keys, self.tier)

    def count_load(self, num_wanted: int, result: MoveResult, *, is_late: bool) -> None:
        """Count the loaded and the missing blocks of a load; the missing ones of a late one were counted before."""
        num_loaded = num_wanted if isinstance(result, Moved) else len(result.moved)
        if num_loaded:
            self.happened["loaded"] += num_loaded
        if isinstance(result, Moved) or is_late:
            return
        self.failed_loads.update(failure.value for failure in result.wrong.values())
        if result.error is not None:
            self.failed_loads[LoadFailure.FAILED.value] += num_wanted - num_loaded - len(result.wrong)

    def take_report(self) -> TierReport | None:
        """Return the changes since the last call; None if there are none."""
        is_stale = self.num_clearing > 0 or self.is_uncleared
        told = (self.index.num_slots, self.index.num_used, is_stale) if self.is_on else (0, 0, is_stale)
        if told == self._told and not self.happened and not self.failed_loads:
            return None
        happened, self.happened = self.happened, Counter()
        failed, self.failed_loads = self.failed_loads, Counter()
        self._told = told
        return TierReport(
            tier=self.tier,
            num_blocks=told[0],
            num_used=told[1],
            num_stored=happened["stored"],
            num_loaded=happened["loaded"],
            num_evicted=happened["evicted"],
            failed_loads=dict(failed),
            is_stale=is_stale,
        )


@attrs.frozen
class TierPlan:
    """The tiers below the device, and how they are used."""

    tiers: Sequence[LowerTier] = ()
    """The one to load from first comes first."""
    num_stored_ahead: int = 0
    """How many of the blocks that are evicted next the host has a copy of, if possible."""
    costs: LoadCosts | None = None
    """Decides what is loaded; None: everything that is found."""
    has_peers: bool = False
    """Whether there are other engines from which blocks can be fetched."""
    quota_blocks: int | None = None
    """How many blocks of a tier one tenant may have; None: all."""


@attrs.frozen
class LostTier:
    """A tier whose memory has failed."""

    tier: Tier
    error: str | None
