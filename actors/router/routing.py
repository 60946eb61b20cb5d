"""The routing of prompts to engines: what is known of each engine, and the choice.

Synchronous. Its sources are its caller (`route`, `drop`) and the engines' reports (`on_stored`, `on_computed`, …). Its
counts are estimates; clients get what the engine reports.

What must always hold: a prompt is only sent to an engine that is in use; nothing of a prompt is kept once it was
dropped; the keys of an engine are those that it has reported.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ..messages.tiers import Tier
from .key_index import KeyIndex
from .loads import Column, EngineLoads
from .lowered_blocks import LoweredBlocks
from .overlaps import TIER_WEIGHTS, Overlap, raise_to, weigh
from .policies import POLICIES, Choice
from .sent_prompts import SentPrompt, SentPrompts
from .shared_blocks import SharedBlocks

MAX_AFFINITIES = 1 << 16
"""Clients of whom it is remembered where they were served; then the oldest is forgotten."""


@attrs.define(eq=False, repr=False)
class Route:
    """Where one prompt was sent, until it is dropped."""

    slot: int
    num_overlapping: int
    """Estimate: tokens of the prompt that the engine holds."""
    num_queued: int
    """Tokens that are still to be computed, as estimated."""
    num_blocks: int
    sent: SentPrompt | None
    is_running: bool = False


class Routing:
    """Chooses an engine for each prompt."""

    def __init__(
        self,
        policy: str = "prefix",
        *,
        block_size: int,
        prefill_budget: int,
        affinity_tokens: int = 512,
        tier_weights: Mapping[Tier, float] = TIER_WEIGHTS,
        seed: int | None = None,
    ) -> None:
        """`policy`: a name of POLICIES. `prefill_budget`: tokens of an engine's step. `tier_weights`: what a
        block in each lower tier is worth, where one on the device is worth 1.
        """
        self._choose = POLICIES[policy]
        self.looks_at_caches = policy in ("prefix", "dynamo")
        self.block_size = block_size
        self._prefill_budget = prefill_budget
        self._affinity_tokens = affinity_tokens
        self._tier_weights = tier_weights
        self._rng = random.Random(seed)  # noqa: S311 - balances load, guards nothing
        self._affinities: OrderedDict[bytes, int] = OrderedDict()
        self._num_routed = 0
        self.index = KeyIndex()
        self.lowered = LoweredBlocks()
        self.shared = SharedBlocks()
        self.loads = EngineLoads()
        self.sent = SentPrompts()

    # ------------------------------------------------------------ engines

    def add_engine(self, num_blocks: int, numerics: str = "") -> int:
        """Return the slot of a new engine, whose cache is empty and holds `num_blocks`."""
        slot = self._take_slot()
        self.shared.add_engine(slot, numerics)
        self.loads.begin(slot, num_blocks * self.block_size)
        return slot

    def remove_engine(self, slot: int) -> None:
        """Send nothing more to an engine, and forget what it holds. The routes to it have to be dropped."""
        self._release_slot(slot)
        self.shared.remove_engine(slot)
        self.loads.end(slot)

    def close_engine(self, slot: int) -> None:
        """Send nothing more to an engine that completes what it has."""
        self.loads.in_use[slot] = False

    def empty_engine(self, slot: int, routes: Iterable[Route]) -> int:
        """Forget what an engine holds, whose `routes` these are. Returns its slot from now on."""
        self._release_slot(slot)
        new = self._take_slot()
        self.loads.move(slot, new)
        self.shared.move_engine(slot, new)
        for route in routes:
            route.slot = new
            if route.sent is not None:
                self.sent.drop(route.sent)
                route.sent = self.sent.add(new, route.sent.keys)
        return new

    def _take_slot(self) -> int:
        slot = self.index.take_slot()
        its = self.lowered.take_slot()
        assert its == slot
        return slot

    def _release_slot(self, slot: int) -> None:
        self.index.release_slot(slot)
        self.lowered.release_slot(slot)

    def _sweep(self) -> None:
        """Forget some more of what engines held that are gone. All indexes do so together, and free slots together."""
        self.index.sweep()
        self.lowered.sweep()

    @property
    def has_engines(self) -> bool:
        """Whether there is an engine that prompts may be sent to."""
        return bool(self.loads.in_use.any())

    @property
    def slots(self) -> list[int]:
        """Engines that prompts may be sent to."""
        return [int(slot) for slot in np.flatnonzero(self.loads.in_use)]

    def on_stored(self, slot: int, keys: Sequence[bytes]) -> None:
        """Note what an engine has cached, in whichever tier."""
        self.index.store(slot, keys)
        self._sweep()

    def on_removed(self, slot: int, keys: Sequence[bytes]) -> None:
        """Note what an engine has evicted from all of its tiers."""
        self.index.remove(slot, keys)
        self.lowered.discard(slot, keys)
        self._sweep()

    def on_moved(self, slot: int, lowered: Mapping[Tier, Sequence[bytes]], raised: Sequence[bytes]) -> None:
        """Note which blocks have another fastest tier from now on, and which are on the device again."""
        for tier, keys in lowered.items():
            self.lowered.add(slot, tier, keys)
        self.lowered.discard(slot, raised)

    # ------------------------------------------------------------ prompts

    def route(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        affinity: bytes | None = None,
        *,
        slots: Sequence[int] | None = None,
    ) -> Route:
        """Choose an engine for a prompt of `num_tokens`, whose full blocks have these keys.

        `affinity`: stands for the client, within its tenant. `slots`: choose one of these engines; None: of all that
        prompts may be sent to. Raises ValueError if there is no engine.
        """
        slot, overlap = self._pick(keys, num_tokens, affinity, slots, self._rng)
        return self.send(slot, keys, num_tokens, int(overlap[slot]), affinity)

    def send(
        self, slot: int, keys: Sequence[bytes], num_tokens: int, num_overlapping: int, affinity: bytes | None
    ) -> Route:
        """Note that a prompt was sent to an engine that was chosen for it."""
        self._num_routed += 1
        if affinity is not None:
            self._remember(affinity, slot)
        loads = self.loads
        num_queued, num_blocks = num_tokens - num_overlapping, -(-num_tokens // self.block_size)
        loads.queued[slot] += num_queued
        loads.blocks[slot] += num_blocks
        loads.place(slot, num_queued)
        sent = self.sent.add(slot, keys) if keys and self.looks_at_caches else None
        return Route(slot, num_overlapping, num_queued, num_blocks, sent)

    def preview(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        affinity: bytes | None = None,
        *,
        slots: Sequence[int] | None = None,
    ) -> int:
        """Return the slot that `route` would choose, and note nothing. Raises ValueError if there is no engine."""
        rng = random.Random()  # noqa: S311 - draws what the next prompt will, and guards nothing
        rng.setstate(self._rng.getstate())
        return self._pick(keys, num_tokens, affinity, slots, rng)[0]

    def _pick(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        affinity: bytes | None,
        slots: Sequence[int] | None,
        rng: random.Random,
    ) -> tuple[int, Column]:
        """Return an engine's slot for a prompt, and how many tokens of it each engine would find."""
        loads, size = self.loads, self.block_size
        in_use = loads.in_use if slots is None else loads.only(slots)
        if not in_use.any():
            raise ValueError("there is no engine")
        reusable: Sequence[bytes] = ()
        if self.looks_at_caches:
            num_reusable = (num_tokens - 1) // size  # the last token is always computed
            reusable = keys if len(keys) <= num_reusable else keys[:num_reusable]
        overlap = self.overlap(reusable)
        return self.choose(num_tokens, overlap.worth * size, in_use, affinity, size, rng), overlap.held * size

    def overlap(self, reusable: Sequence[bytes]) -> Overlap:
        """Return what the engines hold of a prompt's blocks, or are about to."""
        held = worth = np.zeros(len(self.loads.in_use))
        if reusable:
            matches, sent = self.index.match(reusable), self.sent.match(reusable)
            raise_to(held, matches)
            weights, lowered, shared = self._tier_weights, self.lowered, self.shared
            if lowered.is_in_use or shared.is_in_use:
                overlap = weigh(lowered, reusable, matches, held, weights)
                overlap = overlap.followed_by(shared.match(reusable), weights[Tier.REMOTE])
                held, worth = overlap.held, overlap.worth
                raise_to(worth, sent)
            raise_to(held, sent)
        return Overlap(held, worth)

    def choose(
        self,
        num_tokens: int,
        overlap: Column,
        in_use: npt.NDArray[np.bool_],
        affinity: bytes | None,
        block_size: int,
        rng: random.Random | None = None,
    ) -> int:
        """Return one of the slots `in_use` for a prompt. `overlap`: by slot, what is held of it is worth, in
        tokens."""
        preferred = None if affinity is None else self._affinities.get(affinity)
        return self._choose(
            Choice(
                num_tokens, overlap, self.loads, in_use, block_size, self._prefill_budget, self._num_routed,
                rng or self._rng, preferred, self._affinity_tokens,
            )
        )  # fmt: skip

    def follow(self, slot: int, num_tokens: int) -> Route:
        """Send a sequence to an engine without a choice: its prompt is there, or on its way, for another one."""
        num_blocks = -(-num_tokens // self.block_size)
        self.loads.blocks[slot] += num_blocks
        return Route(slot, num_tokens, 0, num_blocks, None)

    def on_admitted(self, route: Route, num_to_compute: int) -> None:
        """Note how many tokens of a prompt an engine has to compute, as it has found out itself."""
        self.loads.queued[route.slot] += num_to_compute - route.num_queued
        route.num_queued = num_to_compute

    def on_computed(self, route: Route, num_tokens: int) -> None:
        """Note that an engine has computed tokens of a prompt."""
        num_done = min(num_tokens, route.num_queued)
        route.num_queued -= num_done
        self.loads.queued[route.slot] -= num_done

    def on_first_token(self, route: Route) -> None:
        """Note that a prompt is complete: its blocks are cached, or were reported."""
        self.on_computed(route, route.num_queued)
        self._forget_sent(route)
        if not route.is_running:
            route.is_running = True
            self.loads.running[route.slot] += 1

    def drop(self, route: Route) -> None:
        """Forget a prompt whose sequence has ended, or whose engine is gone."""
        self._forget_sent(route)
        if self.loads.in_use[route.slot]:
            self.on_computed(route, route.num_queued)
            self.loads.blocks[route.slot] -= route.num_blocks
            self.loads.running[route.slot] -= route.is_running
        route.num_queued = route.num_blocks = 0
        route.is_running = False

    def _forget_sent(self, route: Route) -> None:
        if route.sent is not None:
            self.sent.drop(route.sent)
            route.sent = None

    def _remember(self, affinity: bytes, slot: int) -> None:
        self._affinities[affinity] = slot
        self._affinities.move_to_end(affinity)
        if len(self._affinities) > MAX_AFFINITIES:
            self._affinities.popitem(last=False)
