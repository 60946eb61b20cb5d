// Instructions of AVX512-BF16 in plain C. VDPBF16PS: to each of 16 sums the odd and then the even product of a pair of bfloat16
// are added, each fused, rounded to the nearest even. Denormals are 0 on the way in and out, whatever the environment.
#pragma once

namespace emulation {

inline float flushed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    memcpy(&x, &bits, 4);
    return x;
}

inline float from_bf16(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

inline float fused(float a, float b, float sum) { return flushed(std::fma(a, b, flushed(sum))); }

template <class Sums, class Pairs>
inline Sums add_pairs(Sums sums, Pairs a, Pairs b) {
    float sum[16];
    uint16_t left[32], right[32];
    static_assert(sizeof(sums) == sizeof sum && sizeof(a) == sizeof left, "512 bits");
    memcpy(sum, &sums, sizeof sum);
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    for (int i = 0; i < 16; i++) {
        sum[i] = fused(from_bf16(left[2 * i + 1]), from_bf16(right[2 * i + 1]), sum[i]);
        sum[i] = fused(from_bf16(left[2 * i]), from_bf16(right[2 * i]), sum[i]);
    }
    memcpy(&sums, sum, sizeof sum);
    return sums;
}

// VCVTNE2PS2BF16 in plain C: `low` and then `high`, each rounded to the nearest even; denormals become 0.
template <class Vec>
inline auto rounded(Vec high, Vec low) {
    float x[32];
    uint16_t halves[32];
    memcpy(x, &low, sizeof low);
    memcpy(x + 16, &high, sizeof high);
    for (int i = 0; i < 32; i++) {
        float value = flushed(x[i]);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        halves[i] = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    __m512i result;
    static_assert(sizeof(result) == sizeof halves && sizeof(high) == sizeof x / 2, "512 bits");
    memcpy(&result, halves, sizeof halves);
    return result;
}

}  // namespace emulation

#undef __m512bh
#define __m512bh __m512i
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(high, low) emulation::rounded(high, low)
#define _mm512_dpbf16_ps(sums, a, b) emulation::add_pairs(sums, a, b)
