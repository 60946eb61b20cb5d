// The matrix product on bfloat16 pairs: rows rounded to bfloat16, times a panel of packed weights ([k / 2][kPanel][2]),
// summed in float32. Two instruction sets support it: pairs_avx512.h and pairs_amx.h define the same `Pairs`, which
// linear_bf16.cpp uses.
//
// What must always hold: a sum's bits follow from its row, its column and the points where k is split into calls of `add`,
// which are multiples of kPairStep; not from the number of rows, nor from how rows are grouped into calls. The bits of the
// two differ: a tile sums even and odd k separately, 16 pairs at a time (Intel's Software Developer's Manual, TDPBF16PS),
// the vector instruction adds pair by pair (VDPBF16PS). So one of them is used for all rows.
#pragma once
#include "micro.h"

// A row of x in bfloat16 has a multiple of this many elements; those beyond its width are 0.
constexpr int64_t kPairStep = 32;

inline int64_t padded_depth(int64_t width) { return (width + kPairStep - 1) / kPairStep * kPairStep; }

// Rounds to nearest, ties to even. Denormals become 0, as which products treat them.
inline void round_two(Vec low, Vec high, bf16* to) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }

// The same with a multiple of kPairStep numbers.
inline void round_row(const float* x, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += kPairStep) round_two(load(x + i), load(x + i + kLanes), to + i);
}

// A panel in two halves of kLanes columns each; in both, the columns of a pair are kStep elements after those of the pair before.
template <int64_t kStep>
struct Halves {
    const bf16 *first, *second;
    const bf16* at_first(int64_t k) const { return first + k / 2 * kStep; }
    const bf16* at_second(int64_t k) const { return second + k / 2 * kStep; }
    static constexpr int64_t kBytes = kStep * 2;
};
constexpr int64_t kPacked = 2 * kPanel;
inline Halves<kPacked> packed(const bf16* panel) { return {panel, panel + 2 * kLanes}; }

#if defined(QUIPU_AMX)
#include "pairs_amx.h"
#else
#include "pairs_avx512.h"
#endif
