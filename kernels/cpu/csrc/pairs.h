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

#if defined(QUIPU_AMX)
#include "pairs_amx.h"
#else
#include "pairs_avx512.h"
#endif
