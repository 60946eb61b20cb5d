// What all kernels compute with: `Vec`, as many float32 lanes as the instruction set has, and bfloat16 read into them.
//
// vec_avx2.h and vec_avx512.h give the same names for 8 and for 16 lanes, and nothing outside of the two (but the bf16
// products, linear_bf16.cpp, and 8 x 8 transposes) names an instruction: a kernel is written once, with load, store,
// splat, fma, larger, smaller, sum_lanes, first_lanes and the operators + - * /. The compiler is told to contract
// nothing (-ffp-contract=off): what is fused is fused by name, so the same expression rounds alike wherever it is inlined.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t bf16;

#ifdef QUIPU_AVX512
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

// Ask for a cache line, as far as the second-level cache: the first has too few places to wait in.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline void narrow(float x, float* p) { *p = x; }
// To the nearest, ties to even; a NaN stays one.
inline void narrow(float x, bf16* p) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp to about an ulp: 2**n times a polynomial of degree 6. 0 below -87, where a float32 is nearly denormal, so that
// exp(-inf) is exactly 0; exp(0) is exactly 1; a NaN stays one (larger and smaller give their second operand then).
inline Vec exp(Vec x) {
    Vec in = smaller(splat(88.0f), larger(splat(-87.0f), x));
    Vec n = nearest_integer(in * splat(1.44269504f));
    Vec f = fnma(n, splat(0.693145752f), in);  // ln 2 in two pieces
    f = fnma(n, splat(1.42860677e-6f), f);
    Vec p = splat(1.0f / 720);
    p = fma(p, f, splat(1.0f / 120));
    p = fma(p, f, splat(1.0f / 24));
    p = fma(p, f, splat(1.0f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.0f));
    p = fma(p, f, splat(1.0f));
    return zero_where_below(x, -87.0f, p * power_of_two(n));
}
