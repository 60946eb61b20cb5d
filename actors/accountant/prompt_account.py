"""The numbers that a client is told about one prompt, frozen at the first admission of its first choice. Pure.

    granted ──(revised: a load from a lower tier failed)──▶ settled ──▶ reported, counted, never changed

A grant from the device settles at once, one from a lower tier with the first token: until then a load can fail, and
tokens that failed to load are computed, not reused.

What must always hold: `cached` is the sum of its tiers, none of which is another engine; once settled it does not
change; nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..messages.block_manager import CacheMiss
from ..messages.counts import UNKNOWN, Count, Estimate, Known, billable
from ..messages.handler import PromptNumbers
from ..messages.prompts import Breakpoint, CacheTtl
from ..messages.tiers import CACHE_TIERS, Tier
from .account_entries import Admission
from .coverage import Coverage

DEVICE = Tier.DEVICE.value
TIERS = tuple(tier.value for tier in CACHE_TIERS)
UNATTRIBUTED = "unattributed"


@attrs.define(eq=False)
class PromptAccount:
    """What is booked for one prompt, whichever of its choices did the work."""

    num_prompt_tokens: int
    breakpoints: tuple[Breakpoint, ...] = ()
    """The client's cache breakpoints, in order."""
    admission: Admission | None = None
    """The first admission of its first choice."""
    settled: bool = False
    withdrawn: bool = False
    """The journal had no room for its record: it is not reported."""
    reused: int = 0
    """Granted tokens, less those that came from another engine, and those revised."""
    tiers: dict[str, int] = attrs.field(factory=dict)
    estimated: int | None = None
    """What a router expected to be reused, if there is one."""
    written: Coverage = attrs.field(factory=Coverage)
    num_pinned: int = 0
    """Length of the longest prefix that the engine has pinned because the client marked it."""
    frozen_write_tokens: int | None = None
    """Set at the first choice's first token; later writes are not charged to the client."""
    frozen_created: dict[CacheTtl, int] | None = None
    """Set at the same time."""

    def admit(self, admission: Admission) -> None:
        self.admission = admission
        reused = admission.reused or 0
        self.reused = reused - admission.moved(reused).total
        tiers = {DEVICE: self.reused} if admission.tiers is None else admission.tiers
        self.tiers = {tier: num_tokens for tier, num_tokens in tiers.items() if tier != Tier.PEER}
        lower = any(num_tokens for tier, num_tokens in self.tiers.items() if tier != DEVICE)
        self.settled = admission.reused is not None and not lower

    def revise(self, tier: str, num_tokens: int) -> str | None:
        """Take tokens out of those reused, since they could not be loaded. Return what is wrong with that, if it is."""
        if self.settled:
            return " after they were reported"
        if not 0 <= num_tokens <= self.tiers.get(tier, 0):
            return ", which were not granted"
        self.reused -= num_tokens
        self.tiers[tier] = self.tiers.get(tier, 0) - num_tokens
        return None

    def pin(self, num_tokens: int) -> None:
        self.num_pinned = max(self.num_pinned, num_tokens)

    def freeze_written(self) -> None:
        if self.frozen_write_tokens is None:
            self.frozen_write_tokens = self.cache_write_tokens
            self.frozen_created = self.created

    @property
    def is_admitted(self) -> bool:
        return self.settled and not self.withdrawn

    @property
    def engine_id(self) -> int | None:
        """The engine of that admission."""
        return None if self.admission is None else self.admission.engine_id

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
        """Cached tokens by tier. What no known tier claims is `unattributed`, never counted as the device's."""
        tiers = {tier: self.tiers.get(tier, 0) for tier in TIERS}
        return {**tiers, UNATTRIBUTED: self.reused - sum(tiers.values())}

    @property
    def cache_write_tokens(self) -> int:
        """Positions first written by this request, not counting those it was granted from the cache."""
        if self.frozen_write_tokens is not None:
            return self.frozen_write_tokens
        return self.written_up_to(self.num_prompt_tokens)

    def written_up_to(self, position: int) -> int:
        """Return how many of those positions lie before `position`."""
        both = Coverage()
        both.add(0, min(self.reused, position))
        before = both.total
        for low, high in self.written.intervals:
            both.add(low, min(high, position))
        return both.total - before

    @property
    def created(self) -> dict[CacheTtl, int]:
        """Written and pinned tokens, by the ttl of the first breakpoint after each; 0 if reuse is unknown."""
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

    def problems(self) -> list[str]:
        """Describe tiers with more tokens than were reused in all; empty if there are none."""
        return [
            f"{num_tokens} tokens of tier {tier}, {self.reused} in all"
            for tier, num_tokens in self.by_tier.items()
            if num_tokens < 0
        ]


def told_by_prompt(prompts: Mapping[int, PromptAccount]) -> dict[int, PromptNumbers]:
    """Return what the client is told about each prompt that was admitted."""
    return {
        index: PromptNumbers(prompt.num_prompt_tokens, billable(prompt.cached))
        for index, prompt in prompts.items()
        if prompt.is_admitted
    }
