"""The routing of requests that are passed on: to which upstream, by the same policies as to engines.

Synchronous, and called by the upstreams' actor. What an upstream has cached is known as far as its events say, and what
a prompt's tokens are only where the upstream's tokenizer is; for others it counts the bytes of a request.

What must always hold: a request is only sent to one of the candidates; nothing is kept of it once it was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from .loads import EngineLoads
from .routing import Route, Routing

BYTES_PER_TOKEN = 4
"""Of a request whose tokens are not known."""
ASSUMED_BLOCK_SIZE = 16
ASSUMED_CACHE_TOKENS = 1 << 20
"""Assumed size of an upstream's cache: beyond it, earlier prompts no longer count."""


@attrs.frozen
class PromptKeys:
    """A request's prompt in blocks, as one upstream cuts it."""

    keys: Sequence[bytes]
    num_tokens: int
    block_size: int


@attrs.frozen(eq=False)
class UpstreamRoute:
    """Where a request was sent, until it is dropped."""

    engine_id: int
    estimate: int | None
    """Tokens that the upstream is expected to have cached. None: it is not known what it has."""
    route: Route = attrs.field(repr=False)


class UpstreamRouting:
    def __init__(self, policy: str, *, prefill_budget: int, affinity_tokens: int, seed: int | None = None) -> None:
        self._routing = Routing(
            policy,
            block_size=ASSUMED_BLOCK_SIZE,
            prefill_budget=prefill_budget,
            affinity_tokens=affinity_tokens,
            seed=seed,
        )
        self._index = self._routing.index
        self._slots: dict[int, int] = {}
        """By upstream, its slot among the loads and the prompts that were sent."""
        self._index_slots: dict[int, int] = {}
        """By upstream, its slot in the index: another one each time that its cache is cleared."""

    def add(self, engine_id: int) -> None:
        """Take in an upstream, of whose cache nothing is known."""
        slot = self._slots[engine_id] = len(self._slots)
        self._index_slots[engine_id] = self._index.take_slot()
        self.loads.begin(slot, ASSUMED_CACHE_TOKENS)

    @property
    def loads(self) -> EngineLoads:
        return self._routing.loads

    # ------------------------------------------------------------ caches

    def on_stored(self, engine_id: int, keys: Sequence[bytes]) -> None:
        self._routing.on_stored(self._index_slots[engine_id], keys)

    def on_removed(self, engine_id: int, keys: Sequence[bytes]) -> None:
        self._routing.on_removed(self._index_slots[engine_id], keys)

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
        routing, known = self._routing, next(iter(prompts.values()), None)
        if known is None:
            num_tokens, block_size = num_bytes // BYTES_PER_TOKEN + 1, ASSUMED_BLOCK_SIZE
        else:
            num_tokens, block_size = known.num_tokens, known.block_size
        overlap = np.zeros(len(self.loads.in_use))
        seen = prompts if routing.looks_at_caches else {}
        for engine_id, prompt in seen.items():
            overlap[self._slots[engine_id]] = self._num_overlapping(engine_id, prompt)
        slot = routing.choose(num_tokens, overlap, self.slots_of(candidates), affinity, block_size)
        engine_id = next(engine_id for engine_id in candidates if self._slots[engine_id] == slot)
        chosen = seen.get(engine_id)
        estimate = None if chosen is None else int(overlap[slot])
        keys = () if chosen is None else chosen.keys
        return UpstreamRoute(engine_id, estimate, routing.send(slot, keys, num_tokens, estimate or 0, affinity))

    def _num_overlapping(self, engine_id: int, prompt: PromptKeys) -> int:
        """Return how many tokens of a prompt an upstream holds, or is about to; the last is always computed."""
        reusable = prompt.keys[: (prompt.num_tokens - 1) // prompt.block_size]
        if not reusable:
            return 0
        held_by, sent_to = 1 << self._index_slots[engine_id], 1 << self._slots[engine_id]
        held = [match.num_blocks for match in self._index.match(reusable, held_by) if match.slots & held_by]
        sent = [match.num_blocks for match in self._routing.sent.match(reusable) if match.slots & sent_to]
        return max((*held, *sent), default=0) * prompt.block_size

    def on_answering(self, route: UpstreamRoute) -> None:
        """Note that an upstream has begun to answer: its prompt is computed."""
        self._routing.on_first_token(route.route)

    def drop(self, route: UpstreamRoute) -> None:
        """Forget a request that was answered, or will not be."""
        self._routing.drop(route.route)
