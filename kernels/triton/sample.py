"""Draw a token from each row of logits on the device, as `kernels/sampling/oracle.py` does, but without sorting.

Order a row's tokens by descending logit, ties by ascending id. Every filter keeps a prefix of that order, and the drawn
token is the first at which the cumulative mass exceeds u times the mass of the prefix. So only thresholds are needed: a
logit, and how many of the tokens tied at it belong to the prefix. A threshold is found by bisection over the
ordered keys of logits, counting the tokens (or summing the mass) above each guess.

What must always hold: a draw depends on its own row, parameters, seed and output position only. u comes from Philox as
in `kernels/sampling/philox.py`, so a seed draws the token that the CPU would draw from the same logits, except where
rounding moves a threshold (weights are float32 here, their sums float64).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Map floats to unsigned keys of the same order; both zeros have one key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def weighed(x: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Compute exp((x - highest) / temperature); 0 for tokens that min_p or a ban removes."""
    score = (x - highest) * per_unit
    return tl.where(score >= least, tl.exp2(score), 0.0)


@triton.jit
def above(
    logits_ptr: tl.tensor, key: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, least: tl.tensor,
    COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sum the mass (COUNT: the number) of tokens whose key is at least `key`, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        weight = tl.where((ordered(x) >= key) & (i < V), weighed(x, highest, per_unit, least), 0.0)
        if COUNT:
            weight = tl.where(weight > 0, 1.0, 0.0)
        total += weight.to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def find_threshold(
    logits_ptr: tl.tensor, wanted: tl.tensor, lowest: tl.tensor, top_key: tl.tensor, highest: tl.tensor,
    per_unit: tl.tensor, least: tl.tensor, COUNT: tl.constexpr, STRICTLY: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find the largest key with at least `wanted` (STRICTLY: more) at or above it, between `lowest` and `top_key`."""
    while lowest < top_key:
        guess = lowest + (top_key - lowest + 1) // 2
        found = above(logits_ptr, guess, highest, per_unit, least, COUNT, V, BLOCK)
        enough = found > wanted if STRICTLY else found >= wanted
        if enough:
            lowest = guess
        else:
            top_key = guess - 1
    return lowest


@triton.jit
def draw_kernel(
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    rows_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Draw from row `rows[m]` of the logits (float32) in program m.

    `numbers[m]` holds temperature, log of min_p (-inf: off) and top_p as float64; `counts[m]` holds top_k (0: off),
    seed and output position as int64. A row that holds NaN or has no finite maximum is marked in `failed`.
    """
    m = tl.program_id(0)
    logits_ptr += tl.load(rows_ptr + m) * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    num_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        num_nan += (x != x).to(tl.int32)
        better = x > best
        best_id = tl.where(better, i, best_id)
        best = tl.where(better, x, best)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, best_id, V), 0)
    failed = (tl.sum(num_nan, 0) > 0) | (highest == float("-inf")) | (highest == float("inf"))
    tl.store(failed_ptr + m, failed.to(tl.int32))
    temperature = tl.load(numbers_ptr + 3 * m).to(tl.float32)
    if (temperature > 0) & (failed == 0):
        per_unit = LOG2E / temperature
        least = tl.load(numbers_ptr + 3 * m + 1).to(tl.float32) * LOG2E
        top_p = tl.load(numbers_ptr + 3 * m + 2)
        top_k = tl.load(counts_ptr + 3 * m)
        position = tl.load(counts_ptr + 3 * m + 2)
        top_key = tl.max(ordered(tl.full([BLOCK], 0.0, tl.float32) + highest), 0)
        lowest = top_key - top_key
        # The prefix so far: all keys above `threshold`, and at most `equals` of the tokens tied at it.
        threshold = lowest
        equals = tl.full([], V, tl.float64)
        mass = above(logits_ptr, lowest, highest, per_unit, least, False, V, BLOCK)
        if top_k > 0:
            num_left = above(logits_ptr, lowest, highest, per_unit, least, True, V, BLOCK)
            if num_left > top_k:
                wanted = top_k.to(tl.float64)
                threshold = find_threshold(
                    logits_ptr, wanted, lowest, top_key, highest, per_unit, least, True, False, V, BLOCK
                )  # fmt: skip
                equals = wanted - above(logits_ptr, threshold + 1, highest, per_unit, least, True, V, BLOCK)
                mass = above(logits_ptr, threshold + 1, highest, per_unit, least, False, V, BLOCK)
                mass += equals * weight_at(threshold, highest, per_unit, BLOCK)
        if top_p < 1:
            wanted = top_p * mass
            key = find_threshold(
                logits_ptr, wanted, threshold, top_key, highest, per_unit, least, False, False, V, BLOCK
            )
            before = above(logits_ptr, key + 1, highest, per_unit, least, False, V, BLOCK)
            weight = weight_at(key, highest, per_unit, BLOCK)
            needed = tl.maximum(tl.ceil((wanted - before) / weight), 1.0)
            there = above(logits_ptr, key, highest, per_unit, least, True, V, BLOCK)
            there -= above(logits_ptr, key + 1, highest, per_unit, least, True, V, BLOCK)
            equals = tl.minimum(needed, tl.where(key == threshold, tl.minimum(equals, there), there))
            mass = before + equals * weight
            threshold = key
        zero = (position - position).to(tl.uint32)
        low, high, _, _ = tl.philox(
            tl.load(counts_ptr + 3 * m + 1), position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
        )  # fmt: skip
        bits = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        wanted = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16 * mass
        key = find_threshold(logits_ptr, wanted, threshold, top_key, highest, per_unit, least, False, True, V, BLOCK)
        before = above(logits_ptr, key + 1, highest, per_unit, least, False, V, BLOCK)
        place = tl.floor((wanted - before) / weight_at(key, highest, per_unit, BLOCK))
        place = tl.maximum(place, 0.0)
        if key == threshold:
            place = tl.minimum(place, equals - 1)
        token = nth_of(logits_ptr, key, place.to(tl.int32), V, BLOCK)
    tl.store(ids_ptr + m, token)


@triton.jit
def weight_at(key: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the weight of a token with this key, in float64."""
    bits = tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    x = bits.to(tl.float32, bitcast=True)
    return tl.exp2((x - highest) * per_unit).to(tl.float64)


@triton.jit
def nth_of(logits_ptr: tl.tensor, key: tl.tensor, place: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the id of the token at this place (from 0) among those with the key, or the last of them."""
    token = place - place
    num_before = place - place
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        equal = ((ordered(x) == key) & (i < V)).to(tl.int32)
        count = num_before + tl.cumsum(equal, 0)
        token = tl.maximum(token, tl.max(tl.where((equal == 1) & (count <= place + 1), i, 0), 0))
        num_before += tl.sum(equal, 0)
    return token


@triton.jit
def keep_drawn_kernel(
    ids_ptr: tl.tensor, slots_ptr: tl.tensor, last_drawn_ptr: tl.tensor, num_drawn: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Set `last_drawn[slot] = id` for every row of a pass."""
    m = tl.arange(0, BLOCK)
    here = m < num_drawn
    slots = tl.load(slots_ptr + m, mask=here, other=0)
    ids = tl.load(ids_ptr + m, mask=here, other=0)
    tl.store(last_drawn_ptr + slots, ids, mask=here)
