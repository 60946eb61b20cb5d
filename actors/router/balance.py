"""The choice between this server's engines and upstreams that serve the same model, before a prompt is tokenized.

Synchronous, and asked by the web process for each request that both could serve. Engines and upstreams are compared by
the policy that chooses among each, over the loads that both routings count. A prompt's tokens are not known yet: its
length is a guess from its bytes, and what is cached where is a guess from the beginnings of the bodies that were sent
there. Which engine, or which upstream, is chosen afterwards by those who know more.

What must always hold: only what is ready is chosen while anything is ready; what is kept is bounded; a request weighs
nothing here once it was routed, or is over.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..request_desk.interface import Placement
from .loads import joined
from .policies import POLICIES, Choice
from .routing import Routing
from .upstream_routing import ASSUMED_BLOCK_SIZE, BYTES_PER_TOKEN, UpstreamRouting

PIECE_BYTES = 2048
"""Beginnings of bodies are compared in pieces of this size..."""
MAX_PIECES = 256
"""...up to this many pieces."""
MAX_BEGINNINGS = 1 << 16
"""Beginnings that are remembered; then the oldest is forgotten."""
_DIGEST_BYTES = 16
_OWN, _FAR = 1, 2


class Balance:
    def __init__(
        self, policy: str, own: Routing, upstreams: UpstreamRouting, *, prefill_budget: int, seed: int | None = None
    ) -> None:
        self._choose = POLICIES[policy]
        self._looks_at_caches = policy in ("prefix", "dynamo")
        self._own = own
        self._upstreams = upstreams
        self._prefill_budget = prefill_budget
        self._rng = random.Random(seed)  # noqa: S311 - balances load, guards nothing
        self._number = 0
        self.sent: OrderedDict[bytes, int] = OrderedDict()
        """By the digest of a beginning, to which sides it was sent."""
        self._on_way = {_OWN: 0, _FAR: 0}
        """Tokens of requests that were placed and not routed yet."""

    def place(self, candidates: Sequence[int], body: bytes | bytearray, tenant: str) -> Placement:
        """Choose between the engines and those upstreams, which are ready and serve the model."""
        beginnings = _digests(body, tenant) if self._looks_at_caches else []
        num_cached = {side: self._num_sent(beginnings, side) for side in (_OWN, _FAR)}
        num_tokens = len(body) // BYTES_PER_TOKEN + 1
        side = self._side(candidates, num_tokens, num_cached)
        self._remember(beginnings, side)
        num_queued = max(0, num_tokens - num_cached[side])
        self._on_way[side] += num_queued

        def release() -> None:
            self._on_way[side] -= num_queued

        return Placement(side == _FAR, release)

    def _side(self, candidates: Sequence[int], num_tokens: int, num_cached: dict[int, int]) -> int:
        own, candidate_slots = self._own.loads, self._upstreams.slots_of(candidates)
        if not candidate_slots.any():
            return _OWN
        if not own.in_use.any():
            return _FAR
        both = joined(own, self._upstreams.loads, candidate_slots)
        num_own = len(own.in_use)
        overlap = np.zeros(len(both.in_use))
        for side, columns in ((_OWN, slice(0, num_own)), (_FAR, slice(num_own, None))):
            overlap[columns] = num_cached[side]
            both.queued[columns] += self._on_way[side] / np.count_nonzero(both.in_use[columns])
        slot = self._choose(
            Choice(
                num_tokens, overlap, both, both.in_use, ASSUMED_BLOCK_SIZE, self._prefill_budget, self._number,
                self._rng,
            )
        )  # fmt: skip
        self._number += 1
        return _OWN if slot < num_own else _FAR

    def _num_sent(self, beginnings: Sequence[bytes], side: int) -> int:
        """Return about how many tokens of a prompt were sent to a side before."""
        num_pieces = next(
            (number for number in range(len(beginnings), 0, -1) if self.sent.get(beginnings[number - 1], 0) & side), 0
        )
        return num_pieces * PIECE_BYTES // BYTES_PER_TOKEN

    def _remember(self, beginnings: Sequence[bytes], side: int) -> None:
        for digest in beginnings:
            self.sent[digest] = self.sent.get(digest, 0) | side
            self.sent.move_to_end(digest)
        while len(self.sent) > MAX_BEGINNINGS:
            self.sent.popitem(last=False)


def _digests(body: bytes | bytearray, tenant: str) -> list[bytes]:
    """Return the digests of a body's beginnings, the shortest first. They differ between tenants."""
    digest = hashlib.blake2b(b"%d:" % len(tenant.encode()) + tenant.encode(), digest_size=_DIGEST_BYTES)
    found: list[bytes] = []
    for number in range(min(len(body) // PIECE_BYTES, MAX_PIECES)):
        digest.update(body[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
        found.append(digest.digest())
    return found
