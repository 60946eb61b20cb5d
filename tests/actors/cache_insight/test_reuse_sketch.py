"""The reuse sketch: exact while small, close to exact stack distances otherwise, and the same in C."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.stack_distances import exact_distances, quantile
from quipu.actors.cache_insight.reuse_sketch import (
    MAX_SAMPLED_IN_CALL,
    NUM_BINS,
    ReuseSketch,
    Sketch,
    bin_of,
    blocks_for,
    bounds_of,
    make_sketch,
)
from quipu.actors.shared.native import IS_COMPILED

SMALL = 2 * MAX_SAMPLED_IN_CALL


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def conversations(num_prompts: int, seed: int = 1) -> list[list[bytes]]:
    """Return prompts of conversations: a common beginning, and turns that continue one of many."""
    rng = random.Random(seed)
    heads = [[key(i) for i in range(4)]]
    next_number, prompts = 4, []
    for _ in range(num_prompts):
        before = rng.choice(heads[-400:]) if rng.random() < 0.7 else heads[0]
        prompt = before + [key(next_number + i) for i in range(rng.randint(1, 24))]
        next_number += 24
        heads.append(prompt)
        prompts.append(prompt)
    return prompts


def fed(sketch: Sketch, prompts: list[list[bytes]]) -> Sketch:
    for now, prompt in enumerate(prompts):
        sketch.access(prompt, 0, len(prompt), now, 0)
    return sketch


def test_bins_cover_every_distance() -> None:
    """A distance is within its bin's bounds, and the bins follow one another without gaps."""
    for distance in [*range(5000), *(1 << e for e in range(5, 35)), *((1 << e) - 1 for e in range(5, 35))]:
        assert distance in bounds_of(bin_of(distance))
    assert all(bounds_of(i).stop == bounds_of(i + 1).start for i in range(NUM_BINS - 1))
    assert bin_of(1 << 60) == NUM_BINS - 1


def test_small_working_set_is_exact() -> None:
    """While all keys fit the sample, every count is exact."""
    prompts = conversations(100)
    distances, num_blocks = exact_distances(prompts)
    num_queries, num_new, bins = fed(make_sketch(SMALL, 14), prompts).counts()
    assert (num_queries, num_queries - num_new) == (num_blocks, len(distances))
    expected = [0] * NUM_BINS
    for distance in distances:
        expected[bin_of(distance)] += 1
    assert bins == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_large_working_set_is_close(seed: int) -> None:
    """With a fraction of the keys, sizes are within 10 % of exact stack distances, and the bound within 1 %."""
    prompts = conversations(12_000, seed)
    distances, num_blocks = exact_distances(prompts)
    sketch = fed(make_sketch(8192, 16), prompts)
    num_queries, num_new, bins = sketch.counts()
    assert sketch.shift >= 2 and num_queries == num_blocks
    assert num_queries - num_new == pytest.approx(len(distances), rel=0.01)
    for share in (0.5, 0.9, 0.99):
        assert blocks_for(bins, num_queries - num_new, share) == pytest.approx(quantile(distances, share), rel=0.1)


def test_found_blocks_are_never_new() -> None:
    """A block found in the cache is no miss of an infinite cache, even if the sketch has never seen its key."""
    sketch = make_sketch(SMALL, 14)
    sketch.access([key(i) for i in range(10)], 7, 10, 0, 0)
    assert sketch.counts()[:2] == (10, 3)


def test_last_block_that_cannot_be_found() -> None:
    """A block that a prompt may not read counts as used, but neither as queried nor as found."""
    sketch = make_sketch(SMALL, 14)
    prompt = [key(i) for i in range(4)]
    for _ in range(2):
        sketch.access(prompt, 0, 3, 0, 0)
    num_queries, num_new, bins = sketch.counts()
    assert (num_queries, num_new, sum(bins)) == (6, 3, 3)
    assert sketch.num_keys == 4


def test_filled_blocks_are_hits_of_later_prompts() -> None:
    """A block that decoding filled is not new for the prompt that contains it, and takes room in the cache."""
    sketch = make_sketch(SMALL, 14)
    sketch.access([key(0)], 0, 1, 0, 0)
    sketch.touch(key(1)[:8] + key(2)[:8], 5, 0)
    sketch.access([key(0), key(1)], 0, 2, 9, 0)
    num_queries, num_new, bins = sketch.counts()
    assert (num_queries, num_new) == (3, 1)
    assert {i: n for i, n in enumerate(bins) if n} == {3: 1, 2: 1}


def test_idle_of_sampled_blocks() -> None:
    """`idle` returns the owner, and the seconds since the last use, of blocks in the sample, and nothing of others."""
    sketch = make_sketch(SMALL, 14)
    sketch.access([key(0), key(1)], 0, 2, 10, 3)
    sketch.access([key(0)], 0, 1, 14, 5)
    assert sketch.idle(b"".join(key(i)[:8] for i in (1, 2, 0)), 20) == [(3, 10), (5, 6)]


def test_no_prompt_takes_long() -> None:
    """However long a prompt is, a bounded number of its keys enters the sample."""
    sketch = make_sketch(8192, 14)
    sketch.access([key(i) for i in range(40_000)], 0, 40_000, 0, 0)
    assert 0 < sketch.num_keys <= MAX_SAMPLED_IN_CALL
    assert sketch.counts()[1] == pytest.approx(40_000, rel=0.03)


@pytest.mark.skipif(not IS_COMPILED, reason="installed without a C compiler: there is no sketch in C")
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 1500), st.integers(4, 12))
def test_sketch_in_c_counts_the_same(seed: int, longest: int, register_bits: int) -> None:
    """The sketch in C counts what the one in Python counts, even after samples shrink, and in copies."""
    rng = random.Random(seed)
    twins: list[Sketch] = [ReuseSketch(SMALL, register_bits), make_sketch(SMALL, register_bits)]
    for now in range(rng.randint(1, 20)):
        start = rng.randrange(4000)
        keys = [key(i) for i in range(start, start + rng.randint(1, longest))]
        found, matchable = rng.randint(0, len(keys)), rng.randint(0, len(keys))
        prefixes = b"".join(key(rng.randrange(9000))[:8] for _ in range(30))
        for twin in twins:
            twin.access(keys, found, matchable, now, now % 3)
            twin.touch(prefixes, now, 7)
        assert twins[0].idle(prefixes, 40) == twins[1].idle(prefixes, 40)
        if rng.random() < 0.1:
            twins = [twin.copy() for twin in twins]
        if rng.random() < 0.1:
            assert twins[0].take() == twins[1].take()
    assert twins[0].counts() == twins[1].counts()
    assert [(t.num_keys, t.shift) for t in twins[:1]] == [(t.num_keys, t.shift) for t in twins[1:]]


@pytest.mark.skipif(not IS_COMPILED, reason="installed without a C compiler: there is no sketch in C")
def test_bad_arguments_are_refused_alike() -> None:
    """Both sketches refuse sizes out of bounds; the one in C refuses keys of another length."""
    for kind in (ReuseSketch, make_sketch):
        with pytest.raises(ValueError, match="max_keys=5"):
            kind(5, 14)
        with pytest.raises(ValueError, match="register_bits=40"):
            kind(SMALL, 40)
    with pytest.raises(ValueError, match="32 bytes"):
        make_sketch(SMALL, 14).access([b"short"], 0, 1, 0, 0)
