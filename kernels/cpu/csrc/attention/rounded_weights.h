// The weights of the kernels that round them to bfloat16: as softmax_chunk of attention.cpp, with an exponential that is as accurate
// as such weights need, and without the keys that a row does not see. Used by attention_rows.h.
//
// What must always hold: a row's bits follow from its own scores and the keys that it sees, not from where a piece ends.
#pragma once
#include "attention.h"
#include "../vec/pairs.h"

namespace {

// e^x for x <= 0: within 1e-5 of it, relative (our own fit), and 0 for x < -87, so that no weight is denormal. NaN is
// preserved.
inline Vec exp_of_weight(Vec x) {
    const Vec kInteger = splat(12582912.0f + 127);  // adding it leaves an integer in the lowest bits: the exponent of 2^n, biased
    Vec power = x * splat(1.44269504f), biased = power + kInteger, f = power - (biased - kInteger);
    Vec p = splat(0.0095701f);
    p = fma(p, f, splat(0.05591786f));
    p = fma(p, f, splat(0.24024745f));
    p = fma(p, f, splat(0.69312181f));
    p = fma(p, f, splat(0.99999926f));
    return zero_where_below(x, -87.0f, p * _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(biased), 23)));
}

// A row of `count` scores of a chunk, a multiple of kPairStep, of which it sees first..last, inclusive: none if last < first.
struct ScoreRow {
    float* s;
    int64_t count, first, last;
    // `from` and `to` may lie outside of the row.
    ScoreRow(float* scores, int64_t n, int64_t from, int64_t to)
        : s(scores), count(n), first(std::clamp<int64_t>(from, 0, n)), last(std::clamp<int64_t>(to, first - 1, n - 1)) {}
    // Steps of kPairStep that it sees any of.
    int64_t begin() const { return first / kPairStep * kPairStep; }
    int64_t end() const { return last < first ? begin() : (last / kPairStep + 1) * kPairStep; }

    // Returns the largest score, or `maximum` if that is larger; caps scores first.
    float top(float cap, float maximum) const {
        if (cap > 0)
            for (int64_t i = begin(); i < end(); i += kLanes) store(s + i, capped(load(s + i), cap));
        for (int64_t i = begin(); i < std::min(first, end()); i++) s[i] = -INFINITY;
        for (int64_t i = last + 1; i < end(); i++) s[i] = -INFINITY;
        Vec low = splat(maximum), high = low;
        for (int64_t i = begin(); i < end(); i += kPairStep) low = larger(low, load(s + i)), high = larger(high, load(s + i + kLanes));
        return max_lanes(larger(low, high));
    }
    // Writes rounded weights, 0 for keys that the row does not see; `scales`, if any, are multiplied with the weights. Returns
    // the sum of weights without them.
    float weigh(float top, const float* scales, bf16* weights) const {
        Vec total = splat(0);
        auto weight = [&](int64_t i) { return exp_of_weight(load(s + i) - splat(top)); };
        std::fill(weights, weights + begin(), 0);
        for (int64_t i = begin(); i < end(); i += kPairStep) {
            Vec p = weight(i), q = weight(i + kLanes);
            total = total + p;
            total = total + q;
            if (scales) p = p * load(scales + i), q = q * load(scales + i + kLanes);
            round_two(p, q, weights + i);
        }
        std::fill(weights + end(), weights + count, 0);
        return sum_lanes(total);
    }
};

}  // namespace
