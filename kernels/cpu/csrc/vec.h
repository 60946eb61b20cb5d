// Eight float32 lanes (AVX2 and FMA), and bfloat16 read into them. The compiler is told to contract nothing
// (-ffp-contract=off): what is fused is fused here by name, so the same expression rounds alike wherever it is inlined.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t bf16;
typedef __m256 Vec;
constexpr int kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
    __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

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

// Always in this order, so that a sum has one value.
inline float sum_lanes(Vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// exp to about an ulp: 2**n times a polynomial of degree 6. 0 below -87, where a float32 is nearly denormal, so that
// exp(-inf) is exactly 0; exp(0) is exactly 1; a NaN stays one (max and min give their second operand then).
inline Vec exp(Vec x) {
    Vec tiny = _mm256_cmp_ps(x, splat(-87.0f), _CMP_LT_OQ);
    Vec in = _mm256_min_ps(splat(88.0f), _mm256_max_ps(splat(-87.0f), x));
    Vec n = _mm256_round_ps(_mm256_mul_ps(in, splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec f = _mm256_fnmadd_ps(n, splat(0.693145752f), in);  // ln 2 in two pieces
    f = _mm256_fnmadd_ps(n, splat(1.42860677e-6f), f);
    Vec p = splat(1.0f / 720);
    p = fma(p, f, splat(1.0f / 120));
    p = fma(p, f, splat(1.0f / 24));
    p = fma(p, f, splat(1.0f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.0f));
    p = fma(p, f, splat(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// Mask of the first `count` lanes.
inline __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
