// Codes of quantized matrices in AVX2. See quantized.h for their layout, quantized_product.h for how they are used.
#pragma once

typedef __m256i Ints;  // eight 32-bit lanes
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_ints(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Vec to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Vec bytes_to_floats(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline Ints low_nibbles(Ints words) { return _mm256_and_si256(words, _mm256_set1_epi32(0x0f0f0f0f)); }
inline Ints high_nibbles(Ints words) { return low_nibbles(_mm256_srli_epi32(words, 4)); }

// sums[lane] += four unsigned codes times four signed bytes of x. The sums of pairs of bytes (vpmaddubsw) would not fit into
// 16 bits.
struct FourBytes {
    Ints even, odd;  // bytes 0 and 2, bytes 1 and 3, as 16-bit integers
};
inline FourBytes four_bytes(int32_t bytes) {
    Ints v = splat_int(bytes);
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
inline Ints add_bytes(Ints sums, const FourBytes& x, Ints codes) {
    Ints even = _mm256_and_si256(codes, _mm256_set1_epi32(0x00ff00ff)), odd = _mm256_srli_epi16(codes, 8);
    return _mm256_add_epi32(_mm256_add_epi32(sums, _mm256_madd_epi16(even, x.even)), _mm256_madd_epi16(odd, x.odd));
}
