"""Which two engines a prompt goes to: one computes it, the other goes on.

Used by `timed_cluster.py`. The engine for decoding is the one whose sequences hold the fewest blocks, less those of the
prompt that it holds already; the engine for prefill is chosen by the routing policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quipu.actors.router.routing import Route, Routing


@attrs.frozen
class Pair:
    decode: Route
    prefill: Route | None
    """None: the engine for decoding computes the prompt itself."""


def choose_pair(
    routing: Routing,
    keys: Sequence[bytes],
    num_tokens: int,
    prefill: Sequence[int],
    decode: Sequence[int],
    *,
    block_size: int,
    local_tokens: int,
) -> Pair:
    """Choose one engine of each role for a prompt of `num_tokens`, and note that it is sent there."""
    held = routing.overlap(keys).held
    slot = min(decode, key=lambda one: routing.loads.blocks[one] - held[one])
    num_held = min(int(held[slot]) * block_size, num_tokens - 1)
    if num_tokens - num_held <= local_tokens:
        return Pair(routing.send(slot, keys, num_tokens, num_held, None), None)
    return Pair(routing.follow(slot, num_tokens), routing.route(keys, num_tokens, slots=prefill))
