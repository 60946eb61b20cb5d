"""The workloads of `python -m bench.routing`: a trace of conversations, and made-up ones for any number of engines."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from bench.routing.cluster import DECODED, RoutedJob
from bench.trace_replay import TracedRequest

TRACE_BLOCK = 512
MADE_BLOCK = 128
TURN_TOKENS = (128, 1024)
OUTPUT_TOKENS = (64, 512)
SYSTEM_BLOCKS = 16
MAX_TURNS = 8
THINKING_S = 20.0


def traced(requests: Sequence[TracedRequest]) -> list[RoutedJob]:
    """Return a trace's requests, outputs in units of DECODED tokens."""
    keys: dict[int, bytes] = {}
    return [
        RoutedJob(
            arrival_s=request.arrival_s,
            blocks=request.hash_ids,
            keys=keys_of(request.hash_ids[: request.num_prompt_tokens // TRACE_BLOCK], keys),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=-(-request.num_output_tokens // DECODED),
        )
        for request in requests
    ]


def made(num_conversations: int, per_second: float, seed: int = 1) -> list[RoutedJob]:
    """Return conversations that begin at random, `per_second` of them, each with one of a few system prompts."""
    rng = random.Random(seed)
    num_systems = max(2, num_conversations // 64)
    next_id = num_systems * SYSTEM_BLOCKS
    drawn: list[tuple[float, list[int], int]] = []
    begins = 0.0
    for _ in range(num_conversations):
        begins += rng.expovariate(per_second)
        system = int(num_systems * rng.random() ** 2)  # a few are used much more than others
        ids = list(range(system * SYSTEM_BLOCKS, (system + 1) * SYSTEM_BLOCKS))
        now = begins
        for _ in range(rng.randint(1, MAX_TURNS)):
            num_new = -(-rng.randint(*TURN_TOKENS) // MADE_BLOCK)
            ids = [*ids, *range(next_id, next_id + num_new)]
            next_id += num_new
            drawn.append((now, ids, rng.randint(*OUTPUT_TOKENS) // DECODED))
            now += rng.expovariate(1 / THINKING_S)
    drawn.sort(key=lambda one: one[0])
    keys: dict[int, bytes] = {}
    return [
        RoutedJob(
            arrival_s=arrival,
            blocks=ids,
            keys=keys_of(ids, keys),
            num_prompt_tokens=len(ids) * MADE_BLOCK + 1,
            max_tokens=max(1, num_outputs),
        )
        for arrival, ids, num_outputs in drawn
    ]


def keys_of(blocks: Sequence[int], known: dict[int, bytes]) -> list[bytes]:
    """Return keys that look like digests: the index of keys is divided by their first bytes."""
    for block in blocks:
        if block not in known:
            known[block] = hashlib.sha256(block.to_bytes(8, "little")).digest()
    return [known[block] for block in blocks]
