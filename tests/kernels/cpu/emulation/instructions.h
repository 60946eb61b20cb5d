// AVX-512, AVX-512 BF16 and AMX for processors without them: put before the kernels' sources by the compiler's -include,
// so that the very same sources run. AVX-512 comes from SIMDe, what its packaged version lacks from here; BF16 and AMX are
// in files beside this one, in plain C, as Intel's Software Developer's Manual describes each.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512/add.h>
#include <simde/x86/avx512/and.h>
#include <simde/x86/avx512/blend.h>
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/cmp.h>
#include <simde/x86/avx512/cmpeq.h>
#include <simde/x86/avx512/cvt.h>
#include <simde/x86/avx512/cvts.h>
#include <simde/x86/avx512/dpbusd.h>
#include <simde/x86/avx512/extract.h>
#include <simde/x86/avx512/fmadd.h>
#include <simde/x86/avx512/fnmadd.h>
#include <simde/x86/avx512/loadu.h>
#include <simde/x86/avx512/madd.h>
#include <simde/x86/avx512/max.h>
#include <simde/x86/avx512/min.h>
#include <simde/x86/avx512/mov.h>
#include <simde/x86/avx512/permutex2var.h>
#include <simde/x86/avx512/permutexvar.h>
#include <simde/x86/avx512/or.h>
#include <simde/x86/avx512/roundscale.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/setr.h>
#include <simde/x86/avx512/slli.h>
#include <simde/x86/avx512/srai.h>
#include <simde/x86/avx512/srli.h>
#include <simde/x86/avx512/storeu.h>
#include <simde/x86/avx512/sub.h>
#include <simde/x86/avx512/ternarylogic.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

inline __m512i words_from_halves(__m256i halves) {
    uint16_t from[16];
    uint32_t to[16];
    memcpy(from, &halves, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    __m512i result;
    memcpy(&result, to, sizeof to);
    return result;
}

inline __m512i words_from_bytes(__m128i bytes) {
    int8_t from[16];
    int32_t to[16];
    memcpy(from, &bytes, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    __m512i result;
    memcpy(&result, to, sizeof to);
    return result;
}

inline __m512 floats(__m512i v) {
    int32_t from[16];
    float to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = static_cast<float>(from[i]);
    __m512 result;
    memcpy(&result, to, sizeof to);
    return result;
}

// To the nearest, ties to even: the default rounding mode.
inline __m512i integers(__m512 v) {
    float from[16];
    int32_t to[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = static_cast<int32_t>(std::nearbyint(from[i]));
    __m512i result;
    memcpy(&result, to, sizeof to);
    return result;
}

// Lanes that are masked out are not touched: they may lie outside of the memory.
__attribute__((noinline)) inline __m512 masked_load(unsigned mask, const float* p) {
    float to[16];
    for (int i = 0; i < 16; i++) to[i] = mask >> i & 1 ? p[i] : 0;
    __m512 result;
    memcpy(&result, to, sizeof to);
    return result;
}
__attribute__((noinline)) inline void masked_store(float* p, unsigned mask, __m512 v) {
    float from[16];
    memcpy(from, &v, sizeof from);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) p[i] = from[i];
}

}  // namespace emulation

#define _mm512_cvtepu16_epi32(halves) emulation::words_from_halves(halves)
#define _mm512_cvtepi8_epi32(bytes) emulation::words_from_bytes(bytes)
#define _mm512_cvtepi32_ps(v) emulation::floats(v)
#define _mm512_cvtps_epi32(v) emulation::integers(v)
#define _mm512_maskz_loadu_ps(mask, p) emulation::masked_load(mask, p)
#define _mm512_mask_storeu_ps(p, mask, v) emulation::masked_store(p, mask, v)
#define _mm512_stream_ps(p, v) _mm512_storeu_ps(p, v)

#include "bf16.h"
#include "bytes.h"
#include "tiles.h"
