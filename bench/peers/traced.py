"""The requests of a trace, smaller by a factor, sent to a server as completions: so many at a time, in their order.

Used by `bench.peers.__main__` if a load has a trace. Each id of the trace (512 tokens of a prompt) stands for one block
of 32 tokens, so what the trace shares is shared here, block by block, and a small pool of blocks is as short of room as
a large one is with the trace itself.

What must always hold: a prompt depends on the trace and on the salt only, so that every server is asked the same, and a
new salt asks nothing that a server has seen.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from bench.http_load import COMPLETIONS, PATIENCE_S, LoadFailed
from bench.trace_replay import TracedRequest

TRACED_TOKENS = 512
"""Tokens of a prompt that an id of a trace stands for."""
BLOCK_TOKENS = 32
"""What it stands for here."""
FACTOR = TRACED_TOKENS // BLOCK_TOKENS
NUM_TOGETHER = 8


@attrs.frozen
class TraceRun:
    """What a server has made of a trace."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def numbers(self) -> dict[str, float]:
        """Return the values of the rows in `UNITS`."""
        return {
            "trace": (self.prompt_tokens + self.output_tokens) / self.seconds,
            "trace_cached": 100 * self.cached_tokens / self.prompt_tokens,
        }


UNITS = {"trace": "tokens/s", "trace_cached": "%"}


def prompt_of(request: TracedRequest, salt: str, vocab_size: int) -> list[int]:
    """Return the tokens of a request's prompt. What follows its last id is its own."""
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens += random.Random(f"{salt} {hash_id}").choices(range(1000, vocab_size), k=BLOCK_TOKENS)
    return tokens[: max(1, request.num_prompt_tokens // FACTOR)]


def run_trace(port: int, model: str, requests: Sequence[TracedRequest], salt: str, vocab_size: int) -> TraceRun:
    """Send the requests, the next one as soon as one of those before has ended. Raises LoadFailed and OSError."""
    bodies = [
        {
            "model": model,
            "prompt": prompt_of(request, salt, vocab_size),
            "max_tokens": (num_outputs := max(1, request.num_output_tokens // FACTOR)),
            "min_tokens": num_outputs,
            "ignore_eos": True,
            "temperature": 0,
        }
        for request in requests
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        usages = list(pool.map(lambda body: _usage(port, body), bodies))
    return TraceRun(
        seconds=time.perf_counter() - started,
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        cached_tokens=sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages),
        output_tokens=sum(usage["completion_tokens"] for usage in usages),
    )


def _usage(port: int, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        received = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise LoadFailed(received.decode("utf-8", "replace")[-500:])
    usage: dict[str, Any] = json.loads(received)["usage"]
    return usage
