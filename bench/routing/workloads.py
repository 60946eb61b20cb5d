"""The workloads of `python -m bench.routing`: a trace of conversations, and made-up ones for any number of engines."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from bench.routing.cluster import DECODED, RoutedJob
from bench.simulated import Job
from bench.trace_replay import KEY_BYTES, Setting, TracedRequest, make_job

TRACE_BLOCK = 512
MADE_BLOCK = 128
TURN_TOKENS = (128, 1024)
OUTPUT_TOKENS = (64, 512)
SYSTEM_BLOCKS = 16
MAX_TURNS = 8
THINKING_S = 20.0


def traced(requests: Sequence[TracedRequest]) -> list[RoutedJob]:
    """Return a trace's requests, outputs in units of DECODED tokens."""
    setting = Setting(capacity=None, block_tokens=TRACE_BLOCK)
    keys: dict[int, bytes] = {}
    routed = []
    for number, request in enumerate(requests):
        job = make_job(number, request, setting)
        ids = request.hash_ids[: len(job.keys)]
        keys.update((block, _key(block)) for block in ids if block not in keys)
        job = attrs.evolve(
            job, keys=[keys[block] for block in ids], max_tokens=-(-request.num_output_tokens // DECODED)
        )
        routed.append(RoutedJob(request.arrival_s, job))
    return routed


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
    return [
        RoutedJob(
            arrival,
            Job(
                id=number,
                token_ids=[block for block in ids for _ in range(MADE_BLOCK)] + [0],
                num_prompt_tokens=len(ids) * MADE_BLOCK + 1,
                keys=[_key(block) for block in ids],
                max_tokens=max(1, num_outputs),
            ),
        )
        for number, (arrival, ids, num_outputs) in enumerate(drawn)
    ]


def _key(block: int) -> bytes:
    """Return a key that looks like a digest: the index of keys is divided by their first bytes."""
    return random.Random(block).randbytes(KEY_BYTES)
