"""The simulation of engines with roles: what a transfer costs in virtual time, what is moved, and what pays."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from bench.apart.__main__ import jobs_of
from bench.apart.gpu_costs import GpuCosts, LinkCosts
from bench.apart.timed_cluster import Fleet, Outcome, TimedCluster
from bench.apart.verdicts import verdicts
from bench.trace_replay import TracedRequest

GPU, LINK = GpuCosts(), LinkCosts()
BLOCK = 64
PROMPT = 20 * BLOCK + 10
PAIR = Fleet(num_prefill=1, num_decode=1, block_tokens=BLOCK)


def serve(fleet: Fleet, *requests: TracedRequest) -> Outcome:
    return TimedCluster(fleet, 10_000).serve(jobs_of(requests, BLOCK, rate=1.0))


def one(arrival_s: float = 0.0, first_id: int = 0, num_outputs: int = 4) -> TracedRequest:
    return TracedRequest(arrival_s, PROMPT, num_outputs, [first_id, first_id + 1, first_id + 2])


def chunk_s(start: int, count: int) -> float:
    return GPU.launch_s + max(GPU.weights_s, GPU.token_s * count) + GPU.pair_s * count * (start + count / 2)


def decode_s(context: int) -> float:
    return GPU.launch_s + GPU.weights_s + GPU.context_s * context


def test_second_token_waits_for_the_last_blocks() -> None:
    """The blocks of a prompt's only step are moved after it; then the engine for decoding computes what fills none."""
    found = serve(PAIR, one())
    assert found.first_s == [pytest.approx(chunk_s(0, PROMPT))]
    moving_s = 20 * BLOCK * GPU.kv_bytes / LINK.bytes_per_s + LINK.delay_s
    assert found.second_s == [pytest.approx(moving_s + chunk_s(20 * BLOCK, 11))]
    assert (found.num_apart, found.num_moved, found.num_again, found.num_cached) == (1, 20 * BLOCK, 10, 0)


def test_blocks_are_moved_while_a_prompt_is_computed() -> None:
    """With shorter steps only the last step's blocks are moved after the first token."""
    found = serve(attrs.evolve(PAIR, step_tokens=6 * BLOCK), one())
    moving_s = 2 * BLOCK * GPU.kv_bytes / LINK.bytes_per_s + LINK.delay_s
    assert found.second_s == [pytest.approx(moving_s + chunk_s(20 * BLOCK, 11))]
    assert found.num_moved == 20 * BLOCK


def test_mixed_engine_moves_nothing() -> None:
    """An engine for both computes a prompt once, and decodes step after step."""
    found = serve(Fleet(num_mixed=1, block_tokens=BLOCK), one())
    assert found.gaps_s == [pytest.approx(decode_s(PROMPT + at)) for at in range(3)]
    assert (found.num_apart, found.num_moved, found.num_again) == (0, 0, 0)


def test_prompt_that_the_decode_side_has_is_computed_there() -> None:
    """What an engine for decoding has cached is neither moved nor computed elsewhere."""
    found = serve(PAIR, one(), one(arrival_s=10.0))
    assert (found.num_apart, found.num_moved) == (1, 20 * BLOCK)
    assert found.num_cached == 20 * BLOCK


def test_single_token_stays() -> None:
    """A request for one token needs no engine for decoding."""
    found = serve(PAIR, one(num_outputs=1))
    assert (found.num_apart, found.num_moved, len(found.first_s), found.busy_decode) == (0, 0, 1, 0.0)


@pytest.mark.parametrize(("gap", "first", "word"), [(50, 109, "pays"), (101, 90, "does not"), (50, 111, "does not")])
def test_what_pays(gap: float, first: float, word: str) -> None:
    """Roles pay if tokens come more evenly than from any mixed engine, and the first one little later."""

    def row(name: str, gap: float, first: float) -> dict[str, Any]:
        return {"rate": 1.0, "engines": name, "gap_p99_ms": gap, "ttft_p99_ms": first}

    (line,) = verdicts([row("mixed, 512", 100, 120), row("mixed, 2048", 200, 100), row("2:6", gap, first)])
    assert f"2:6 {word}" in line
