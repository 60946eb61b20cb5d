// The matrix product on bfloat16 pairs: rows that were rounded to bfloat16, times a panel of packed weights
// ([k / 2][kPanel][2]), summed in float32. Two instruction sets have instructions for it: pairs_avx512.h and pairs_amx.h
// give the same `Pairs`, linear_bf16.cpp uses it.
//
// What must always hold: a sum's bits follow from its row, its column and the places where k is cut to call `add`, which
// are multiples of kPairStep; not from how many rows there are, nor from which of them lie in one call. The two do not
// give each other's bits: a tile adds up even and odd k by themselves, 16 pairs at a time (Intel's Software Developer's
// Manual, TDPBF16PS), the vector instruction takes each pair as it comes (VDPBF16PS). So one of them serves all rows.
#pragma once
#include "micro.h"

// A row of x in bfloat16 is this many elements, or a multiple of them; what is beyond its width is 0.
constexpr int64_t kPairStep = 32;

inline int64_t padded_depth(int64_t width) { return (width + kPairStep - 1) / kPairStep * kPairStep; }

#if defined(QUIPU_AMX)
#include "pairs_amx.h"
#else
#include "pairs_avx512.h"
#endif
