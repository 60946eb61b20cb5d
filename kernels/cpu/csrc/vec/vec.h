// The vector type of all kernels: `Vec`, as many float32 lanes as the instruction set has, and loads of bfloat16 and int8.
//
// vec_avx2.h and vec_avx512.h define the same names for 8 and for 16 lanes, and no other file (except products of other types,
// pairs_*.h, codes_*.h, quantized*.h and attention_bf16.cpp, and 8 x 8 transposes) uses intrinsics: a kernel is written once, with load, store,
// splat, fma, larger, smaller, sum_lanes, first_lanes and the operators + - * /. The compiler must not contract (-ffp-contract=off): fused
// operations are written explicitly, so an expression rounds alike wherever it is inlined.
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

// Prefetches a cache line into the second-level cache: the first has too few fill buffers.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_first(const void* p) { __builtin_prefetch(p, 0, 3); }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline void narrow(float x, float* p) { *p = x; }
// Rounds to nearest, ties to even; NaN is preserved.
inline void narrow(float x, bf16* p) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *p = x != x ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp, accurate to about an ulp: 2**n times a polynomial of degree 6. 0 below -87, where a float32 is nearly denormal, so
// that exp(-inf) is exactly 0; exp(0) is exactly 1; NaN is preserved (larger and smaller return their second operand then).
inline Vec exp(Vec x) {
    Vec in = smaller(splat(88.0f), larger(splat(-87.0f), x));
    Vec n = nearest_integer(in * splat(1.44269504f));
    Vec f = fnma(n, splat(0.693145752f), in);  // ln 2 in two parts
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
