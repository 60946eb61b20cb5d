"""Drawing a token from each row of logits, on the device: the draw of `kernels/sampling/oracle.py`, without a sort.

Order a row's tokens by logit, descending, and equals by id, ascending. Every filter then keeps a head of that order,
and the draw is the first token at which the mass before and with it passes u times the mass of the head. So all
there is to find is borders: a logit and how many of the tokens that have it. A border is found bit by bit, from the
largest down, by asking how many tokens (or how much mass) a guess leaves above.

What must always hold: the draw depends on its own row, parameters, seed and output position, on nothing else; u is
Philox's number of `kernels/sampling/philox.py`, so a seed gives the token that the CPU would draw from the same logits,
but where rounding moves a border (weights are float32 here, their sums float64).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Unsigned keys that are ordered as the numbers are, both zeros alike."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def weighed(x: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, least: tl.tensor) -> tl.tensor:
    """exp((x - highest) / temperature), 0 where min_p or a ban leaves nothing."""
    score = (x - highest) * per_unit
    return tl.where(score >= least, tl.exp2(score), 0.0)


@triton.jit
def above(
    logits_ptr: tl.tensor, key: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, least: tl.tensor,
    COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Mass, or number, of the tokens whose key is at least `key`, float64."""
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
def find_border(
    logits_ptr: tl.tensor, wanted: tl.tensor, lowest: tl.tensor, top_key: tl.tensor, highest: tl.tensor,
    per_unit: tl.tensor, least: tl.tensor, COUNT: tl.constexpr, STRICTLY: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest key with `wanted` (STRICTLY: more) at it or above; `lowest` has, and none beyond `top_key`."""
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
    """Program m draws from row `rows[m]` of the logits (float32).

    `numbers[m]` is temperature, log of min_p (-inf: off) and top_p, float64; `counts[m]` is top_k (0: off), seed and
    output position, int64. A row that is not numbers, or has no finite maximum, is marked in `failed`.
    """
    m = tl.program_id(0)
    logits_ptr += tl.load(rows_ptr + m) * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    num_strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + i, mask=i < V, other=float("-inf"))
        num_strange += (x != x).to(tl.int32)
        better = x > best
        best_id = tl.where(better, i, best_id)
        best = tl.where(better, x, best)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, best_id, V), 0)
    failed = (tl.sum(num_strange, 0) > 0) | (highest == float("-inf")) | (highest == float("inf"))
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
        # The head so far: keys above `border`, and `equals` tokens (there may be fewer) of those that have it.
        border = lowest
        equals = tl.full([], V, tl.float64)
        mass = above(logits_ptr, lowest, highest, per_unit, least, False, V, BLOCK)
        if top_k > 0:
            num_left = above(logits_ptr, lowest, highest, per_unit, least, True, V, BLOCK)
            if num_left > top_k:
                wanted = top_k.to(tl.float64)
                border = find_border(
                    logits_ptr, wanted, lowest, top_key, highest, per_unit, least, True, False, V, BLOCK
                )  # fmt: skip
                equals = wanted - above(logits_ptr, border + 1, highest, per_unit, least, True, V, BLOCK)
                mass = above(logits_ptr, border + 1, highest, per_unit, least, False, V, BLOCK)
                mass += equals * weight_at(border, highest, per_unit, BLOCK)
        if top_p < 1:
            wanted = top_p * mass
            key = find_border(logits_ptr, wanted, border, top_key, highest, per_unit, least, False, False, V, BLOCK)
            before = above(logits_ptr, key + 1, highest, per_unit, least, False, V, BLOCK)
            weight = weight_at(key, highest, per_unit, BLOCK)
            needed = tl.maximum(tl.ceil((wanted - before) / weight), 1.0)
            there = above(logits_ptr, key, highest, per_unit, least, True, V, BLOCK)
            there -= above(logits_ptr, key + 1, highest, per_unit, least, True, V, BLOCK)
            equals = tl.minimum(needed, tl.where(key == border, tl.minimum(equals, there), there))
            mass = before + equals * weight
            border = key
        zero = (position - position).to(tl.uint32)
        low, high, _, _ = tl.philox(
            tl.load(counts_ptr + 3 * m + 1), position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
        )  # fmt: skip
        bits = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        wanted = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16 * mass
        key = find_border(logits_ptr, wanted, border, top_key, highest, per_unit, least, False, True, V, BLOCK)
        before = above(logits_ptr, key + 1, highest, per_unit, least, False, V, BLOCK)
        place = tl.floor((wanted - before) / weight_at(key, highest, per_unit, BLOCK))
        place = tl.maximum(place, 0.0)
        if key == border:
            place = tl.minimum(place, equals - 1)
        token = nth_of(logits_ptr, key, place.to(tl.int32), V, BLOCK)
    tl.store(ids_ptr + m, token)


@triton.jit
def weight_at(key: tl.tensor, highest: tl.tensor, per_unit: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The weight of a token with this key, float64."""
    bits = tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    x = bits.to(tl.float32, bitcast=True)
    return tl.exp2((x - highest) * per_unit).to(tl.float64)


@triton.jit
def nth_of(logits_ptr: tl.tensor, key: tl.tensor, place: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The token id at this place, from 0, among those that have the key; the last of them where they are fewer."""
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
    ids_ptr: tl.tensor, failed_ptr: tl.tensor, slots_ptr: tl.tensor, last_drawn_ptr: tl.tensor, num_drawn: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`last_drawn[slot] = id` for every row of a pass, or, where one of them failed, for none."""
    m = tl.arange(0, BLOCK)
    here = m < num_drawn
    failed = tl.sum(tl.load(failed_ptr + m, mask=here, other=0), 0)
    slots = tl.load(slots_ptr + m, mask=here, other=0)
    ids = tl.load(ids_ptr + m, mask=here, other=0)
    if failed == 0:
        tl.store(last_drawn_ptr + slots, ids, mask=here)
