// Sixteen float32 lanes: AVX-512 (F, BW, DQ and VL). See vec.h.
#pragma once
#include <immintrin.h>

typedef __m512 Vec;
typedef __mmask16 Mask;
constexpr int kLanes = 16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
    __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
// Integers from -127 to 127, as bytes.
inline void store_bytes(int8_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec splat_from(const float* p) { return _mm512_set1_ps(*p); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// Of two numbers; returns the second operand if one is NaN.
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float first_lane(Vec v) { return _mm_cvtss_f32(_mm512_castps512_ps128(v)); }

// sum += a * b, in the register of the sum; see vec_avx2.h.
inline Vec accumulate(Vec sum, Vec a, Vec b) {
#ifdef __AVX512F__
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return fma(a, b, sum);  // if the instructions are emulated
#endif
}

// Of 32-bit words with two bfloat16 each: the low and the high ones.
inline Vec low_halves(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline Vec high_halves(const bf16* p) {
    __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}

// Always in this order, so that sums are reproducible.
inline float sum_lanes(Vec v) {
    __m128 low = _mm_add_ps(_mm512_extractf32x4_ps(v, 0), _mm512_extractf32x4_ps(v, 2));
    __m128 high = _mm_add_ps(_mm512_extractf32x4_ps(v, 1), _mm512_extractf32x4_ps(v, 3));
    __m128 four = _mm_add_ps(low, high);
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec v) {
    __m128 low = _mm_max_ps(_mm512_extractf32x4_ps(v, 0), _mm512_extractf32x4_ps(v, 2));
    __m128 high = _mm_max_ps(_mm512_extractf32x4_ps(v, 1), _mm512_extractf32x4_ps(v, 3));
    __m128 four = _mm_max_ps(low, high);
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline Vec nearest_integer(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
// 2**n for integers from -126 to 127
inline Vec power_of_two(Vec n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Vec zero_where_below(Vec x, float bound, Vec y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(bound), _CMP_NLT_UQ), y);
}

// The first `count` lanes, or all if there are fewer. Other lanes are 0.
inline Mask first_lanes(int64_t count) {
    return static_cast<Mask>(count <= 0 ? 0 : count >= kLanes ? 0xffff : (1u << count) - 1);
}
inline Vec load(const float* p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline void store(float* p, Mask mask, Vec v) { _mm512_mask_storeu_ps(p, mask, v); }
