// Eight float32 lanes: AVX2 and FMA. See vec.h.
#pragma once
#include <immintrin.h>

typedef __m256 Vec;
typedef __m256i Mask;
constexpr int kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const bf16* p) {
    __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
// Integers from -127 to 127, as bytes.
inline void store_bytes(int8_t* p, Vec v) {
    __m256i words = _mm256_cvtps_epi32(v);
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec splat_from(const float* p) { return _mm256_broadcast_ss(p); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
// Of two numbers; returns the second operand if one is NaN.
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float first_lane(Vec v) { return _mm256_cvtss_f32(v); }

// sum += a * b, in the register of the sum. If the compiler may choose among all forms of this instruction, it moves sums
// between registers until some spill, which costs a third of the speed.
inline Vec accumulate(Vec sum, Vec a, Vec b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

// Of 32-bit words with two bfloat16 each: the low and the high ones.
// In assembly, so that each uses one register and the mask none: the sums need the others.
inline Vec low_halves(const bf16* p) {
    Vec v;
    asm("vmovups %1, %0\n\tvpslld $16, %0, %0" : "=x"(v) : "m"(*reinterpret_cast<const __m256_u*>(p)));
    return v;
}
inline Vec high_halves(const bf16* p) {
    alignas(32) static const uint32_t high[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    Vec v;
    asm("vmovaps %1, %0\n\tvandps %2, %0, %0"
        : "=x"(v)
        : "m"(*reinterpret_cast<const __m256*>(high)), "m"(*reinterpret_cast<const __m256_u*>(p)));
    return v;
}

// See micro.h. All at once, so that one register is enough for the left operand.
__attribute__((always_inline)) inline void accumulate_row(Vec (&sums)[3], const Vec (&right)[3], const float* left) {
    Vec l, s0 = sums[0], s1 = sums[1], s2 = sums[2];
    asm("vbroadcastss %7, %3\n\tvfmadd231ps %3, %4, %0\n\tvfmadd231ps %3, %5, %1\n\tvfmadd231ps %3, %6, %2"
        : "+x"(s0), "+x"(s1), "+x"(s2), "=&x"(l)
        : "x"(right[0]), "x"(right[1]), "x"(right[2]), "m"(*left));
    sums[0] = s0, sums[1] = s1, sums[2] = s2;
}

__attribute__((always_inline)) inline void accumulate_row(Vec (&sums)[4], const Vec (&right)[4], const float* left) {
    Vec l, s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
    asm("vbroadcastss %9, %4\n\tvfmadd231ps %4, %5, %0\n\tvfmadd231ps %4, %6, %1\n\tvfmadd231ps %4, %7, %2\n\tvfmadd231ps %4, %8, %3"
        : "+x"(s0), "+x"(s1), "+x"(s2), "+x"(s3), "=&x"(l)
        : "x"(right[0]), "x"(right[1]), "x"(right[2]), "x"(right[3]), "m"(*left));
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

// Always in this order, so that sums are reproducible.
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

inline Vec nearest_integer(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2**n for integers from -126 to 127
inline Vec power_of_two(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec zero_where_below(Vec x, float bound, Vec y) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(bound), _CMP_LT_OQ), y);
}

// The first `count` lanes, or all if there are fewer. Other lanes are 0.
inline Mask first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load(const float* p, Mask mask) { return _mm256_maskload_ps(p, mask); }
inline void store(float* p, Mask mask, Vec v) { _mm256_maskstore_ps(p, mask, v); }
