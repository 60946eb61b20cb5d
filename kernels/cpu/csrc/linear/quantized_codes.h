// How quantized matrices are multiplied, and the formats of their codes: one class for each. See quantized.h for the layout.
#pragma once
#include "quantized.h"

#ifdef QUIPU_AVX512
#include "codes_avx512.h"
#else
#include "codes_avx2.h"
#endif

// How units are multiplied. `kInputs` inputs of x are one 32-bit word.

struct FloatProduct {
    static constexpr int kInputs = 1;
    static constexpr bool kNeedsSums = false;  // of x, for more than offsets
    static constexpr bool kHasFactors = false;  // whether each group of x has a scale
    typedef Vec Sum;
    typedef Vec Right;
    static Sum start(const uint32_t*) { return splat(0); }
    // sums += a unit of x times codes
    template <int N>
    static void add_row(Sum* sums, const uint32_t* unit, const Right (&codes)[N]) {
        Vec row[N];
        UNROLL for (int v = 0; v < N; v++) row[v] = sums[v];
        accumulate_row(row, codes, reinterpret_cast<const float*>(unit));
        UNROLL for (int v = 0; v < N; v++) sums[v] = row[v];
    }
    template <class T>
    static void scale_row(T*, int64_t) {}
    static Vec value(Sum sum, float) { return sum; }
    static Vec sum_of_x(float sum) { return splat(sum); }
    static void keep(float* p, Sum sum) { store(p, sum); }
    static Sum kept(const float* p) { return load(p); }
};

#ifdef QUIPU_PAIRS
struct PairProduct : FloatProduct {
    static constexpr int kInputs = 2;
    typedef Ints Right;
    template <int N>
    static void add_row(Sum* sums, const uint32_t* unit, const Right (&codes)[N]) {
        Ints x = splat_int(static_cast<int32_t>(*unit));
        UNROLL for (int v = 0; v < N; v++) sums[v] = _mm512_dpbf16_ps(sums[v], (__m512bh)x, (__m512bh)codes[v]);
    }
};
#endif

struct ByteProduct {
    static constexpr int kInputs = 4;
    static constexpr bool kNeedsSums = false;
    static constexpr bool kHasFactors = true;
    typedef Ints Sum;
    typedef Ints Right;
    static Sum start(const uint32_t* of_x) { return splat_int(static_cast<int32_t>(*of_x)); }
    template <int N>
    static void add_row(Sum* sums, const uint32_t* unit, const Right (&codes)[N]) {
        FourBytes x = four_bytes(static_cast<int32_t>(*unit));
        UNROLL for (int v = 0; v < N; v++) sums[v] = add_bytes(sums[v], x, codes[v]);
    }
    static Vec value(Sum sum, float) { return to_float(sum); }
    static Vec sum_of_x(float sum) { return to_float(splat_int(bits_of(sum))); }
    static void keep(float* p, Sum sum) { store_ints(p, sum); }
    static Sum kept(const float* p) { return load_ints(p); }

private:
    static int32_t bits_of(float x) {
        int32_t bits;
        memcpy(&bits, &x, 4);
        return bits;
    }
};

// Formats of codes: `load` reads a block of a panel, kUnits units of its two halves, and `get` returns one of them.

struct Floats2 {
    Vec low, high;
};
struct Ints2 {
    Ints low, high;
};

template <class P>
struct Expanded {  // by `expand`, in quantized_product.h
    typedef P Product;
    static constexpr int kUnits = 1, kBytes = 4 * kLanes;
    struct Loader {
        Floats2 load(const uint8_t* p) const {
            return {::load(reinterpret_cast<const float*>(p)), ::load(reinterpret_cast<const float*>(p + kBytes))};
        }
        template <int>
        void get(const Floats2& raw, Vec& low, Vec& high) const { low = raw.low, high = raw.high; }
    };
};
struct FloatCodes8 {
    typedef FloatProduct Product;
    typedef Expanded<FloatProduct> Wide;
    static constexpr int kUnits = 1, kBytes = kLanes;
    struct Loader {
        Floats2 load(const uint8_t* p) const { return {bytes_to_floats(p), bytes_to_floats(p + kBytes)}; }
        template <int>
        void get(const Floats2& raw, Vec& low, Vec& high) const { low = raw.low, high = raw.high; }
    };
};
// Two vectors of 32-bit words.
struct WordLoader {
    Ints2 load(const uint8_t* p) const { return {load_ints(p), load_ints(p + 4 * kLanes)}; }
};
#ifdef QUIPU_AVX512
template <bool kE2m1>
struct FloatCodes4Of {
    typedef FloatProduct Product;
    typedef Expanded<FloatProduct> Wide;
    static constexpr int kUnits = 8, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        Vec table = kE2m1 ? _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6)
                          : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        // the permutation takes the low four bits of an index
        template <int i>
        void get(const Ints2& raw, Vec& low, Vec& high) const {
            low = _mm512_permutexvar_ps(_mm512_srli_epi32(raw.low, 4 * i), table);
            high = _mm512_permutexvar_ps(_mm512_srli_epi32(raw.high, 4 * i), table);
        }
    };
};
typedef FloatCodes4Of<false> FloatCodes4;
typedef FloatCodes4Of<true> FloatCodesE2m1;
#else
// AVX2 has no permutation of sixteen lanes, and shifting each code into place would take most of the time. So codes are
// converted where they are in a word, as `256^j (code + 8)`, and x is divided by 256^j, which is exact from 2^-102 on. Eight
// times the sum of x is subtracted at the end of a group.
struct NibbleProduct : FloatProduct {
    static constexpr bool kNeedsSums = true;
    static Vec value(Sum sum, float sum_of_x) { return fnma(splat(8), splat(sum_of_x), sum); }
    static void scale_row(float* x, int64_t width) {
        for (int64_t k = 0; k < width; k++) x[k] *= 1.0f / static_cast<float>(1 << (k % 8 / 2 * 8));
    }
};
struct FloatCodes4 {
    typedef NibbleProduct Product;
    typedef Expanded<NibbleProduct> Wide;
    static constexpr int kUnits = 8, kBytes = 4 * kLanes;
    struct Loader {
        Ints2 load(const uint8_t* p) const {
            Ints bias = splat_int(static_cast<int>(0x88888888u));
            return {_mm256_xor_si256(load_ints(p), bias), _mm256_xor_si256(load_ints(p + 4 * kLanes), bias)};
        }
        template <int i>
        static Vec code(Ints words) {
            return to_float(_mm256_and_si256(i % 2 ? _mm256_srli_epi32(words, 4) : words, splat_int(15 << (i / 2 * 8))));
        }
        template <int i>
        void get(const Ints2& raw, Vec& low, Vec& high) const { low = code<i>(raw.low), high = code<i>(raw.high); }
    };
};
struct FloatCodesE2m1 {
    typedef FloatProduct Product;
    typedef Expanded<FloatProduct> Wide;
    static constexpr int kUnits = 8, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        Vec table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        // the permutation takes the low three bits of an index
        template <int i>
        Vec code(Ints words) const {
            Vec size = _mm256_permutevar8x32_ps(table, i ? _mm256_srli_epi32(words, 4 * i) : words);
            Vec sign = _mm256_castsi256_ps(i < 7 ? _mm256_slli_epi32(words, 28 - 4 * i) : words);
            return _mm256_or_ps(size, _mm256_and_ps(sign, splat(-0.0f)));
        }
        template <int i>
        void get(const Ints2& raw, Vec& low, Vec& high) const { low = code<i>(raw.low), high = code<i>(raw.high); }
    };
};
#endif

#ifdef QUIPU_PAIRS
struct ExpandedPairs {
    typedef PairProduct Product;
    static constexpr int kUnits = 1, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        template <int>
        void get(const Ints2& raw, Ints& low, Ints& high) const { low = raw.low, high = raw.high; }
    };
};
// bfloat16 of the integers 0 to 127, as low and high bytes.
struct SmallIntegers {
    uint8_t low[128], high[128];
    constexpr SmallIntegers() : low(), high() {
        for (int i = 1; i < 128; i++) {
            int exponent = 0;
            while (2 << exponent <= i) exponent++;
            int bits = (127 + exponent) << 7 | ((i << (7 - exponent)) & 127);
            low[i] = static_cast<uint8_t>(bits & 255), high[i] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
// A byte is the sign and the magnitude of a code; -0 stands for -128, which a matrix rarely has (`kWhole`). Of each 16 bytes
// the first eight are of the low half: then interleaving the two bytes of results gives both halves.
template <bool kWhole>
struct PairCodes8Of {
    typedef PairProduct Product;
    typedef ExpandedPairs Wide;
    static constexpr int kUnits = 1, kBytes = 2 * kLanes;
    static constexpr SmallIntegers kTable{};
    struct Loader {
        Ints low0 = load_ints(kTable.low), low1 = load_ints(kTable.low + 64);
        Ints high0 = load_ints(kTable.high), high1 = load_ints(kTable.high + 64);
        Ints load(const uint8_t* p) const { return load_ints(p); }
        template <int>
        void get(Ints codes, Ints& low, Ints& high) const {
            Ints sign = splat_int(static_cast<int>(0x80808080u));
            Ints l = _mm512_permutex2var_epi8(low0, codes, low1), h = _mm512_permutex2var_epi8(high0, codes, high1);
            h = _mm512_ternarylogic_epi32(h, codes, sign, 0xf8);  // h | (codes & sign)
            if (kWhole) h = _mm512_mask_blend_epi8(_mm512_cmpeq_epi8_mask(codes, sign), h, splat_int(static_cast<int>(0xc3c3c3c3u)));
            low = _mm512_unpacklo_epi8(l, h), high = _mm512_unpackhi_epi8(l, h);
        }
    };
};
typedef PairCodes8Of<false> PairCodes8;
typedef PairCodes8Of<true> WholePairCodes8;
template <bool kE2m1>
struct PairCodes4Of {
    typedef PairProduct Product;
    typedef ExpandedPairs Wide;
    static constexpr int kUnits = 4, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        // the permutation takes the low five bits of an index: the table is there twice, so that the fifth does not matter
        Ints table = load_ints(kE2m1 ? kE2m1Table : kTable);
        template <int i>
        void get(const Ints2& raw, Ints& low, Ints& high) const {
            low = _mm512_permutexvar_epi16(_mm512_srli_epi32(raw.low, 4 * i), table);
            high = _mm512_permutexvar_epi16(_mm512_srli_epi32(raw.high, 4 * i), table);
        }
    };
    // 0 to 7, then -8 to -1
    static constexpr bf16 kTable[32] = {
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    };
    static constexpr bf16 kE2m1Table[32] = {
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    };
};
typedef PairCodes4Of<false> PairCodes4;
typedef PairCodes4Of<true> PairCodesE2m1;
#endif

struct ByteCodes8 {
    typedef ByteProduct Product;
    static constexpr int kUnits = 1, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        template <int>
        void get(const Ints2& raw, Ints& low, Ints& high) const { low = raw.low, high = raw.high; }
    };
};
struct ByteCodes4 {
    typedef ByteProduct Product;
    static constexpr int kUnits = 2, kBytes = 4 * kLanes;
    struct Loader : WordLoader {
        template <int i>
        void get(const Ints2& raw, Ints& low, Ints& high) const {
            low = i ? high_nibbles(raw.low) : low_nibbles(raw.low), high = i ? high_nibbles(raw.high) : low_nibbles(raw.high);
        }
    };
};
