"""The routing of requests that are passed on: to which upstream, by the same policies as to engines.

Synchronous, and called by the upstreams' actor. What an upstream has cached is known as far as its events say, and what
a prompt's tokens are only where the upstream's tokenizer is; for others it counts the bytes of a request.

What must always hold: a request is only sent to one of the candidates; nothing is kept of it once it was dropped.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from .key_index import KeyIndex
from .loads import EngineLoads
from .policies import POLICIES, Choice
from .routing import MAX_AFFINITIES
from .sent_prompts import SentPrompt, SentPrompts

BYTES_PER_TOKEN = 4
"""Of a request whose tokens are not known."""
ASSUMED_BLOCK_SIZE = 16
ASSUMED_CACHE_TOKENS = 1 << 20
"""What an upstream is taken to hold: after which prompts that were sent to it do not count any more."""


@attrs.frozen
class PromptKeys:
    """A request's prompt in blocks, as one upstream cuts it."""

    keys: Sequence[bytes]
    num_tokens: int
    block_size: int


@attrs.define(eq=False)
class UpstreamRoute:
    """Where a request was sent, until it is dropped."""

    engine_id: int
    slot: int
    num_queued: int
    num_blocks: int
    estimate: int | None
    """Tokens that the upstream is expected to have cached. None: it is not known what it has."""
    sent: SentPrompt | None
    is_running: bool = False


class UpstreamRouting:
    def __init__(self, policy: str, *, prefill_budget: int, affinity_tokens: int, seed: int | None = None) -> None:
        self._choose = POLICIES[policy]
        self._looks_at_caches = policy in ("prefix", "dynamo")
        self._prefill_budget = prefill_budget
        self._affinity_tokens = affinity_tokens
        self._rng = random.Random(seed)  # noqa: S311 - balances load, guards nothing
        self._slots: dict[int, int] = {}
        """By upstream, its slot among the loads and the prompts that were sent."""
        self._index_slots: dict[int, int] = {}
        """By upstream, its slot in the index: another one each time that its cache is cleared."""
        self._affinities: OrderedDict[bytes, int] = OrderedDict()
        self._num_routed = 0
        self._index = KeyIndex()
        self.loads = EngineLoads()
        self._sent = SentPrompts()

    def add(self, engine_id: int) -> None:
        """Take in an upstream, of whose cache nothing is known."""
        slot = self._slots[engine_id] = len(self._slots)
        self._index_slots[engine_id] = self._index.take_slot()
        self.loads.begin(slot, ASSUMED_CACHE_TOKENS)

    # ------------------------------------------------------------ caches

    def on_stored(self, engine_id: int, keys: Sequence[bytes]) -> None:
        self._index.store(self._index_slots[engine_id], keys)
        self._index.sweep()

    def on_removed(self, engine_id: int, keys: Sequence[bytes]) -> None:
        self._index.remove(self._index_slots[engine_id], keys)
        self._index.sweep()

    def on_cleared(self, engine_id: int) -> None:
        """Forget what an upstream has cached.

        Takes a time that depends neither on how much it was nor on how many requests are open.
        """
        old = self._index_slots[engine_id]
        self._index_slots[engine_id] = self._index.take_slot()
        self._index.release_slot(old)

    # ------------------------------------------------------------ requests

    def slots_of(self, candidates: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return which slots these upstreams have."""
        return self.loads.only([self._slots[engine_id] for engine_id in candidates])

    def route(
        self,
        candidates: Sequence[int],
        num_bytes: int,
        prompts: Mapping[int, PromptKeys],
        affinity: bytes | None = None,
    ) -> UpstreamRoute:
        """Choose one of the upstreams for a request. `prompts`: by upstream, where its blocks are known."""
        loads = self.loads
        in_use = self.slots_of(candidates)
        overlap = np.zeros(len(loads.in_use))
        for engine_id, prompt in prompts.items():
            if self._looks_at_caches and engine_id in self._slots:
                overlap[self._slots[engine_id]] = self._num_overlapping(engine_id, prompt)
        known = next(iter(prompts.values()), None)
        num_tokens = num_bytes // BYTES_PER_TOKEN + 1 if known is None else known.num_tokens
        preferred = None if affinity is None else self._slots.get(self._affinities.get(affinity, -1))
        slot = self._choose(
            Choice(
                num_tokens, overlap, loads, in_use, ASSUMED_BLOCK_SIZE if known is None else known.block_size,
                self._prefill_budget, self._num_routed, self._rng, preferred, self._affinity_tokens,
            )
        )  # fmt: skip
        self._num_routed += 1
        engine_id = next(engine_id for engine_id in candidates if self._slots[engine_id] == slot)
        if affinity is not None:
            self._remember(affinity, engine_id)
        chosen = prompts.get(engine_id) if self._looks_at_caches else None
        estimate = None if chosen is None else int(overlap[slot])
        num_queued = max(0, num_tokens - (estimate or 0))
        num_blocks = -(-num_tokens // ASSUMED_BLOCK_SIZE)
        loads.queued[slot] += num_queued
        loads.blocks[slot] += num_blocks
        loads.place(slot, num_queued)
        sent = self._sent.add(slot, chosen.keys) if chosen is not None and chosen.keys else None
        return UpstreamRoute(engine_id, slot, num_queued, num_blocks, estimate, sent)

    def _num_overlapping(self, engine_id: int, prompt: PromptKeys) -> int:
        """Return how many tokens of a prompt an upstream holds, or is about to; the last is always computed."""
        reusable = prompt.keys[: (prompt.num_tokens - 1) // prompt.block_size]
        if not reusable:
            return 0
        held_by, sent_to = 1 << self._index_slots[engine_id], 1 << self._slots[engine_id]
        held = [match.num_blocks for match in self._index.match(reusable, held_by) if match.slots & held_by]
        sent = [match.num_blocks for match in self._sent.match(reusable) if match.slots & sent_to]
        return max((*held, *sent), default=0) * prompt.block_size

    def on_answering(self, route: UpstreamRoute) -> None:
        """Note that an upstream has begun to answer: its prompt is computed."""
        self.loads.queued[route.slot] -= route.num_queued
        route.num_queued = 0
        self._forget_sent(route)
        if not route.is_running:
            route.is_running = True
            self.loads.running[route.slot] += 1

    def drop(self, route: UpstreamRoute) -> None:
        """Forget a request that was answered, or will not be."""
        self._forget_sent(route)
        self.loads.queued[route.slot] -= route.num_queued
        self.loads.blocks[route.slot] -= route.num_blocks
        self.loads.running[route.slot] -= route.is_running
        route.num_queued = route.num_blocks = 0
        route.is_running = False

    def _forget_sent(self, route: UpstreamRoute) -> None:
        if route.sent is not None:
            self._sent.drop(route.sent)
            route.sent = None

    def _remember(self, affinity: bytes, engine_id: int) -> None:
        self._affinities[affinity] = engine_id
        self._affinities.move_to_end(affinity)
        if len(self._affinities) > MAX_AFFINITIES:
            self._affinities.popitem(last=False)
