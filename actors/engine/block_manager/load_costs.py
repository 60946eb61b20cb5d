"""Whether a prefix is loaded from lower tiers or computed again: whichever is faster, as measured.

Used by `lower_tiers.py`. The mover says how long each load took, the scheduler how long a position takes to compute. A
table of fixed costs (`--kv-load-costs`) takes the place of both, so that tests and simulations decide the same each
time.

    load     latency of the tier + seconds per block of it, of each stretch
    compute  seconds per token

What must always hold: what was never measured counts as free to load, so that it is measured; estimates follow the
latest measurements, and one slow load is no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import attrs
import msgspec

from ...messages.tiers import Tier
from .load_parts import Stretch

WEIGHT: Final = 0.2
"""Of a new measurement, beside all earlier ones."""
RETRIED_AFTER: Final = 16
"""Decisions against a tier until it is tried once more, since it may have become faster."""


class LoadPolicy(StrEnum):
    """When blocks are loaded from lower tiers (`--kv-load`)."""

    ALWAYS = "always"
    AUTO = "auto"
    """Where that is faster than computing them."""
    NEVER = "never"


@attrs.frozen
class FixedCosts:
    """Costs that are not measured."""

    compute_s: float
    """Seconds to compute a token."""
    latency_s: Mapping[Tier, float]
    """Seconds until a load from a tier begins to bring blocks..."""
    block_s: Mapping[Tier, float]
    """...and seconds for each block then."""


class LoadCosts:
    """What loads and computing cost, and what follows from it."""

    def __init__(self, policy: LoadPolicy, block_size: int, fixed: FixedCosts | None = None) -> None:
        self._policy = policy
        self._block_size = block_size
        self._fixed = fixed
        self.compute_s = 0.0 if fixed is None else fixed.compute_s
        """Seconds to compute a token; 0: not known."""
        self._block_s: dict[Tier, float] = {}
        """Seconds per block of a load, its latency included, by tier."""
        self._num_declined: dict[Tier, int] = {}
        """Decisions against a tier since its last load."""

    def on_loaded(self, tier: Tier, num_blocks: int, seconds: float) -> None:
        """Note how long a load of `num_blocks` took."""
        self._num_declined.pop(tier, None)
        if num_blocks and tier is not Tier.PEER:  # it may have been computing them in that time
            took = seconds / num_blocks
            before = self._block_s.get(tier, took)
            self._block_s[tier] = before + WEIGHT * (took - before)

    def on_declined(self, stretches: Iterable[Stretch]) -> None:
        """Note that a prompt computes what it could have loaded. One that waits for room has decided nothing yet."""
        for stretch in stretches:
            self._num_declined[stretch.tier] = self._num_declined.get(stretch.tier, 0) + 1

    def on_computed(self, token_s: float) -> None:
        """Note how long a token takes to compute in a step that is filled with prompts."""
        if self._fixed is None and token_s > 0:
            self.compute_s = token_s

    def load_s(self, tier: Tier, num_blocks: int) -> float:
        """Return how many seconds a load is expected to take."""
        if self._fixed is not None:
            return self._fixed.latency_s.get(tier, 0.0) + num_blocks * self._fixed.block_s.get(tier, 0.0)
        return num_blocks * self._block_s.get(tier, 0.0)

    def worth_loading(self, stretches: Sequence[Stretch]) -> int:
        """Return how many leading stretches to load, so that the whole prefix is there soonest."""
        if self._policy is LoadPolicy.NEVER:  # which is about caches
            return next((at for at, stretch in enumerate(stretches) if stretch.tier is not Tier.PEER), len(stretches))
        if self._policy is LoadPolicy.ALWAYS or not self.compute_s:
            return len(stretches)
        best, best_saved, saved = 0, 0.0, 0.0
        for num, stretch in enumerate(stretches, 1):
            num_blocks = len(stretch.keys)
            saved += num_blocks * self._block_size * self.compute_s - self.load_s(stretch.tier, num_blocks)
            if saved > best_saved or self._is_due(stretch.tier):
                best, best_saved = num, saved
        return best

    def _is_due(self, tier: Tier) -> bool:
        """Return whether a tier that was found slow is to be tried again."""
        return self._fixed is None and self._num_declined.get(tier, 0) >= RETRIED_AFTER


def fixed_costs_of(text: str | None) -> FixedCosts | None:
    """Read `--kv-load-costs`: {"compute_s": 0.001, "latency_s": {"disk": 0.01}, "block_s": {"disk": 0.004}}.

    None: there are none. Raises ValueError.
    """
    if text is None:
        return None
    try:
        return msgspec.json.decode(text.encode(), type=FixedCosts)
    except msgspec.MsgspecError as error:
        raise ValueError(f"--kv-load-costs: {error}") from error
