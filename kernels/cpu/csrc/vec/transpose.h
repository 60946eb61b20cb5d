// Transposing keys, which products read word by word. Attention does so with keys that blocks store as rows, and writing the
// cache with those that they store transposed (program.h).
#pragma once
#include <immintrin.h>

#include <algorithm>

#include "../program.h"

constexpr int64_t kTranspose = 8;  // keys, and words of each, that are transposed at a time

// Transposes 8 keys x 8 words into 8 words x 8 keys; in `to`, words are `stride` keys apart.
inline void transpose(const uint32_t* const* rows, int64_t word, uint32_t* to, int64_t stride) {
    auto half = [&](int i, int64_t at) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + word + at)); };
    for (int64_t at = 0; at < kTranspose; at += 4) {
        __m256 r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(half(i, at)), half(i + 4, at), 1);
        __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
        __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
        float* p = reinterpret_cast<float*>(to + at * stride);
        _mm256_storeu_ps(p, _mm256_shuffle_ps(a, c, 0x44));
        _mm256_storeu_ps(p + stride, _mm256_shuffle_ps(a, c, 0xee));
        _mm256_storeu_ps(p + 2 * stride, _mm256_shuffle_ps(b, d, 0x44));
        _mm256_storeu_ps(p + 3 * stride, _mm256_shuffle_ps(b, d, 0xee));
    }
}

// Transposes 16 keys x 16 elements of an 8-bit cache into 16 elements x 16 keys of a panel.
inline void transpose(const int8_t* const* rows, int64_t element, int8_t* to) {
    __m128i r[kSlots];
    for (int64_t i = 0; i < kSlots; i++) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + element));
    for (int round = 0; round < 4; round++) {
        __m128i next[kSlots];
        for (int64_t i = 0; i < kSlots / 2; i++) {
            next[2 * i] = _mm_unpacklo_epi8(r[i], r[i + kSlots / 2]);
            next[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + kSlots / 2]);
        }
        std::copy(next, next + kSlots, r);
    }
    for (int64_t i = 0; i < kSlots; i++) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * kSlots), r[i]);
}
