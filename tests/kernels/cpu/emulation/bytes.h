// What products with quantized matrices need and SIMDe's packaged version lacks: conversions of float16, bytes and integers,
// and sums of two products of 16-bit integers. In plain C, or by the instructions of half a register.
#pragma once

namespace emulation {

inline __m512 floats_from_halves(__m256i halves) {
    __m256i parts;
    memcpy(&parts, &halves, sizeof parts);
    __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(parts)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(parts, 1));
    __m512 result;
    memcpy(&result, &low, sizeof low);
    memcpy(reinterpret_cast<char*>(&result) + sizeof low, &high, sizeof high);
    return result;
}

inline __m512 floats_from_integers(__m512i v) {
    int32_t from[16];
    float to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = static_cast<float>(from[i]);
    __m512 result;
    memcpy(&result, to, sizeof to);
    return result;
}

inline __m512i integers_from_bytes(__m128i bytes) {
    int8_t from[16];
    int32_t to[16];
    memcpy(from, &bytes, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    __m512i result;
    memcpy(&result, to, sizeof to);
    return result;
}

inline __m512i sums_of_two(__m512i a, __m512i b) {
    int16_t left[32], right[32];
    int32_t sums[16];
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    for (int i = 0; i < 16; i++) sums[i] = left[2 * i] * right[2 * i] + left[2 * i + 1] * right[2 * i + 1];
    __m512i result;
    memcpy(&result, sums, sizeof sums);
    return result;
}

}  // namespace emulation

#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(halves) emulation::floats_from_halves(halves)
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(v) emulation::floats_from_integers(v)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(bytes) emulation::integers_from_bytes(bytes)
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) emulation::sums_of_two(a, b)
