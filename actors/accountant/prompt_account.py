"""What a client is told of one prompt: frozen at the first admission of its first choice.

Part of the account (`account.py`). Pure.

    granted ──(revised: a load from a lower tier failed)──▶ settled ──▶ reported, counted, never changed

A grant from the device settles at once. One from a lower tier settles with the first token: until then a load can
fail, and what failed is computed, not reused.

What must always hold: `cached` is the sum of its tiers; once settled it does not change; nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..messages.accountant import Side
from ..messages.block_manager import CacheMiss
from ..messages.counts import UNKNOWN, Count, Estimate, Known
from ..messages.prompts import Breakpoint, CacheTtl
from .coverage import Coverage

DEVICE = "device"
TIERS = (DEVICE, "host", "disk", "remote")
UNATTRIBUTED = "unattributed"


@attrs.frozen(kw_only=True)
class Admission:
    """One admission of one sequence, as the engine booked it when the admission's first step was done."""

    number: int
    """1 at a sequence's first on its side, counted up by preemption."""
    side: Side = Side.PREFILL
    reused: int | None
    """By the block manager. None: the engine does not count."""
    tiers: Mapping[str, int] | None = None
    """Of `reused`; None: all of it lay on the device."""
    read: int
    """By the executor."""
    copyable: int = 0
    """Tokens behind the reused ones of which the manager has pointed out a copy. It counts as nobody's discount."""
    copied: int = 0
    """Those of them that the executor copied instead of computing them."""
    miss: CacheMiss | None
    incarnation: int | None
    at: float


@attrs.define(eq=False)
class PromptBook:
    num_prompt_tokens: int
    breakpoints: tuple[Breakpoint, ...] = ()
    """What its client has marked, in order."""
    admission: Admission | None = None
    """Of its first choice."""
    settled: bool = False
    withdrawn: bool = False
    """It could not be written down: nobody is told of it."""
    reused: int = 0
    """What is left of the grant after revisions."""
    tiers: dict[str, int] = attrs.field(factory=dict)
    estimated: int | None = None
    written: Coverage = attrs.field(factory=Coverage)
    num_pinned: int = 0
    """Tokens from the first on that the engine keeps because they are marked."""
    frozen_write_tokens: int | None = None
    """Set with the first choice's first token; later writes are not the client's."""
    frozen_created: dict[CacheTtl, int] | None = None
    """Likewise."""

    def admit(self, admission: Admission) -> None:
        self.admission = admission
        self.reused = admission.reused or 0
        self.tiers = {DEVICE: self.reused} if admission.tiers is None else dict(admission.tiers)
        lower = any(num_tokens for tier, num_tokens in self.tiers.items() if tier != DEVICE)
        self.settled = admission.reused is not None and not lower

    def revise(self, tier: str, num_tokens: int) -> None:
        """These tokens could not be loaded."""
        self.reused -= num_tokens
        self.tiers[tier] = self.tiers.get(tier, 0) - num_tokens

    def write(self, start: int, end: int) -> None:
        self.written.add(start, end)

    def pin(self, num_tokens: int) -> None:
        self.num_pinned = max(self.num_pinned, num_tokens)

    def freeze_written(self) -> None:
        if self.frozen_write_tokens is None:
            self.frozen_write_tokens = self.cache_write_tokens
            self.frozen_created = self.created

    # ------------------------------------------------------------ what can be said

    @property
    def is_admitted(self) -> bool:
        return self.settled and not self.withdrawn

    @property
    def miss(self) -> CacheMiss | None:
        return None if self.admission is None else self.admission.miss

    @property
    def cached(self) -> Count:
        if self.admission is None or self.admission.reused is None:
            return UNKNOWN if self.estimated is None else Estimate(self.estimated)
        return Known(self.reused)

    @property
    def by_tier(self) -> dict[str, int]:
        """Known cached tokens by tier. What no known tier claims is nobody's: it is never labelled as the device's."""
        tiers = {tier: self.tiers.get(tier, 0) for tier in TIERS}
        return {**tiers, UNATTRIBUTED: self.reused - sum(tiers.values())}

    @property
    def cache_write_tokens(self) -> int:
        """Positions written first by this request, those it was granted as cached aside."""
        if self.frozen_write_tokens is not None:
            return self.frozen_write_tokens
        return self.written_up_to(self.num_prompt_tokens)

    def written_up_to(self, position: int) -> int:
        """Those of them that lie before `position`."""
        both = Coverage()
        both.add(0, min(self.reused, position))
        before = both.total
        for low, high in self.written.intervals:
            both.add(low, min(high, position))
        return both.total - before

    @property
    def created(self) -> dict[CacheTtl, int]:
        """Of the written tokens, those up to the last breakpoint, by the ttl of the first breakpoint after each.

        Only those that are pinned. None are where it is not known what was reused: they might be the same ones.
        """
        if self.frozen_created is not None:
            return self.frozen_created
        created = dict.fromkeys(CacheTtl, 0)
        if isinstance(self.cached, Known):
            so_far = 0
            for breakpoint_ in self.breakpoints:
                up_to = self.written_up_to(min(breakpoint_.position, self.num_pinned))
                created[breakpoint_.ttl] += up_to - so_far
                so_far = up_to
        return created

    def dispute(self) -> list[str]:
        """Why its parts do not make a whole; empty where they do."""
        return [
            f"{num_tokens} tokens of tier {tier}, {self.reused} in all"
            for tier, num_tokens in self.by_tier.items()
            if num_tokens < 0
        ]
