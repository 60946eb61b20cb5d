// Quantized matrices: integer codes of 4 or 8 bits, and a scale (and an offset) for each group of a row's inputs. An element
// is scale * code + offset. ../../quantized_packing.py fills `QuantizedMatrix`, which `Op::weight` points to if `Op::stored` is kQuantized.
//
// A panel's codes are [block][half][kLanes][bytes of a lane], but for one format whose halves are interleaved: a block is what
// one load of a half's lanes holds, one or several units for each of kLanes columns. A unit is what one multiplication takes of a column: one input (float32 products), two
// (bfloat16 pairs) or four (bytes). quantized_codes.h has the formats; `code_place` is the
// one description of where a code is.
#pragma once
#include "../vec/micro.h"

struct QuantizedMatrix {
    int64_t width;       // inputs
    int64_t group_size;  // inputs that share a scale: a power of two from 16 to kQuantizedDepth (of byte products: 512), or width
    int64_t num_groups;
    int32_t bits;        // 4 or 8
    int32_t halves;      // 1: scales and offsets are float16; 0: float32
    int32_t byte_products;  // 1: activations are rounded to 8 bits (linear_bytes.cpp); 0: they are not (linear_quantized.cpp)
    int32_t has_lowest;  // 1: 8-bit codes include -128
    int32_t e2m1;        // 1: 4-bit codes are e2m1 numbers: a sign, and the index of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (no byte products)
    const uint8_t* codes;
    const void* scales;  // [panel][group][kPanel]
    const void* offsets; // the same, or null

    int64_t padded_width() const { return (width + 7) / 8 * 8; }
    int64_t panel_bytes() const { return padded_width() * kPanel * bits / 8; }
};

// Inputs that are multiplied between two visits of a row's sums in memory; a panel of that depth stays in the first-level cache.
constexpr int64_t kQuantizedDepth = 256;

#ifdef QUIPU_AVX512
inline Vec load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
#else
inline Vec load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
#endif

// The scales or offsets of kLanes columns.
inline Vec load_shared(const QuantizedMatrix& m, const void* numbers, int64_t panel, int64_t group, int half) {
    int64_t at = (panel * m.num_groups + group) * kPanel + half * kLanes;
    return m.halves ? load_halves(static_cast<const uint16_t*>(numbers) + at) : load(static_cast<const float*>(numbers) + at);
}

// Where a panel has the code of a column's input: a byte, and the bits in it.
struct CodePlace {
    int64_t byte;
    int shift;  // of 4-bit codes
};
#ifdef QUIPU_PAIRS
constexpr bool kPairCodes = true;
#else
constexpr bool kPairCodes = false;
#endif
inline CodePlace code_place(const QuantizedMatrix& m, int64_t lane, int64_t k) {
    int64_t half = lane / kLanes, column = lane % kLanes;
    if (m.bits == 8) {
        if (kPairCodes && !m.byte_products)  // see PairCodes8Of
            return {k / 2 * 4 * kLanes + column / 4 * 16 + half * 8 + column % 4 * 2 + k % 2, 0};
        int64_t per_lane = m.byte_products ? 4 : 1;
        return {((k / per_lane * 2 + half) * kLanes + column) * per_lane + k % per_lane, 0};
    }
    // a 32-bit word has eight codes of a column
    int64_t word = (k / 8 * 2 + half) * kLanes + column, i = k % 8;
    int nibble = static_cast<int>(m.byte_products ? i % 4 * 2 + i / 4 : kPairCodes ? i / 2 + i % 2 * 4 : i);
    return {word * 4 + nibble / 2, nibble % 2 * 4};
}

// Codes are stored as a product needs them, so that it takes the fewest instructions: with a bias (byte products), as sign and
// magnitude (8 bits of pairs), or as they are.
inline int stored_bias(const QuantizedMatrix& m) { return m.byte_products ? 1 << (m.bits - 1) : 0; }
inline bool has_magnitudes(const QuantizedMatrix& m) { return kPairCodes && m.bits == 8 && !m.byte_products; }
inline uint8_t stored_code(const QuantizedMatrix& m, int code) {
    if (has_magnitudes(m)) return static_cast<uint8_t>(code < 0 ? 128 | (-code & 127) : code);
    code += stored_bias(m);
    return static_cast<uint8_t>(m.bits == 4 ? code & 15 : code & 255);
}
inline int code_of(const QuantizedMatrix& m, uint8_t stored) {
    if (has_magnitudes(m)) return stored == 128 ? -128 : stored & 128 ? -(stored & 127) : stored;
    if (m.byte_products) return stored - stored_bias(m);
    return m.bits == 4 ? (stored ^ 8) - 8 : static_cast<int8_t>(stored);
}
