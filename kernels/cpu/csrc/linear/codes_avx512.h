// Codes of quantized matrices in AVX-512. See quantized.h for their layout, quantized_product.h for how they are used.
#pragma once

typedef __m512i Ints;  // sixteen 32-bit lanes
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Vec to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec bytes_to_floats(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline Ints low_nibbles(Ints words) { return _mm512_and_si512(words, _mm512_set1_epi32(0x0f0f0f0f)); }
inline Ints high_nibbles(Ints words) { return low_nibbles(_mm512_srli_epi32(words, 4)); }

// sums[lane] += four unsigned codes times four signed bytes of x.
#ifdef QUIPU_VNNI
typedef Ints FourBytes;
inline FourBytes four_bytes(int32_t bytes) { return splat_int(bytes); }
inline Ints add_bytes(Ints sums, FourBytes x, Ints codes) { return _mm512_dpbusd_epi32(sums, codes, x); }
#else
struct FourBytes {
    Ints even, odd;  // bytes 0 and 2, bytes 1 and 3, as 16-bit integers
};
inline FourBytes four_bytes(int32_t bytes) {
    Ints v = splat_int(bytes);
    return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)};
}
inline Ints add_bytes(Ints sums, const FourBytes& x, Ints codes) {
    Ints even = _mm512_and_si512(codes, _mm512_set1_epi32(0x00ff00ff)), odd = _mm512_srli_epi16(codes, 8);
    return _mm512_add_epi32(_mm512_add_epi32(sums, _mm512_madd_epi16(even, x.even)), _mm512_madd_epi16(odd, x.odd));
}
#endif
