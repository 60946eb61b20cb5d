// Products of a few query rows with keys and values where they are in the cache, with AVX-512 BF16: a step that decodes reads
// each of them once, so packing a copy for `Pairs` would cost more than the product. Used by attention_bf16.cpp; with AMX,
// whose tiles sum in another order, nothing is multiplied in place.
//
// What must always hold: the bits are those of `Pairs::add` over a packed copy: one chain per sum, k ascending.
#pragma once
#include "attention.h"
#include "pairs.h"

namespace {

// Interleaves 16 integers of two rows as pairs of bfloat16. Their float32 have nothing in the lower half.
inline __m512i interleaved(const int8_t* even, const int8_t* odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(load(even)), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(load(odd)));
}

constexpr int64_t kPairsPerPrefetch = 8;

// How often the functions below advance the prefetcher.
inline int64_t calls_in_place(int64_t num_rows, int64_t num_vecs, int64_t num_pairs) {
    int64_t widest = num_rows <= 2 ? 8 : 4, rest = num_vecs % widest;
    return (num_vecs / widest + rest / 2 + rest % 2) * (num_pairs / kPairsPerPrefetch);
}

#ifdef QUIPU_AMX
constexpr int64_t kRowsInPlace = 0;
template <class T>
void add_keys_in_place(const bf16*, int64_t, int64_t, const T* const*, int64_t, int64_t, float*, SlotPrefetch&) {}
template <class T>
void add_values_in_place(const bf16*, int64_t, const T* const*, int64_t, int64_t, float*, int64_t, SlotPrefetch&) {}
#else
constexpr int64_t kRowsInPlace = kMaxRows;

inline __m512i interleaved(const bf16* even, const bf16* odd) {
    auto words = [](const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); };
    return _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16));
}

// Pair `word` of 16 keys of a panel.
inline __m512i key_pairs(const bf16* panel, int64_t word) { return _mm512_loadu_si512(panel + word * 2 * kSlots); }
inline __m512i key_pairs(const int8_t* panel, int64_t word) {
    return interleaved(panel + 2 * word * kSlots, panel + (2 * word + 1) * kSlots);
}

// sums[row][v * kLanes ..] = (fresh ? 0 : sums) + x[row] * right(pair, v), over all pairs
template <int MR, int NV, class Right>
__attribute__((noinline)) void add_pairs(const bf16* x, int64_t x_stride, int64_t num_pairs, bool fresh, float* sums,
                                         int64_t sums_stride, const Right& right, SlotPrefetch& prefetch) {
    Vec sum[MR][NV];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) sum[m][v] = fresh ? splat(0) : load(sums + m * sums_stride + v * kLanes);
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        if (pair % kPairsPerPrefetch == 0) prefetch.advance();
        __m512i left[MR];
        UNROLL for (int m = 0; m < MR; m++) {
            int32_t word;
            memcpy(&word, x + m * x_stride + 2 * pair, 4);
            left[m] = _mm512_set1_epi32(word);
        }
        UNROLL for (int v = 0; v < NV; v++) {
            __m512i pairs = right(pair, v);
            UNROLL for (int m = 0; m < MR; m++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], (__m512bh)left[m], (__m512bh)pairs);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) store(sums + m * sums_stride + v * kLanes, sum[m][v]);
}

// Calls go(v, NV) for parts of `num_vecs` vectors, as large as registers allow.
template <int kWidest, class F>
void in_parts(int64_t num_vecs, F go) {
    int64_t v = 0;
    for (; v + kWidest <= num_vecs; v += kWidest) go(v, std::integral_constant<int, kWidest>{});
    for (; v + 2 <= num_vecs; v += 2) go(v, std::integral_constant<int, 2>{});
    if (v < num_vecs) go(v, std::integral_constant<int, 1>{});
}

// scores[row][16 * panel ..] = queries[row] * the keys of each panel
template <class T>
void add_keys_in_place(const bf16* queries, int64_t stride, int64_t num_rows, const T* const* panels, int64_t num_panels,
                       int64_t width, float* scores, SlotPrefetch& prefetch) {
    with_rows(num_rows, [&](auto rows) {
        constexpr int MR = rows.value;
        in_parts<(MR <= 2 ? 8 : 4)>(num_panels, [&](int64_t first, auto count) {
            auto right = [&](int64_t pair, int v) { return key_pairs(panels[first + v], pair); };
            add_pairs<MR, count.value>(queries, stride, width / 2, true, scores + first * kSlots, kChunk, right, prefetch);
        });
    });
}

// results[row][..width) += weights[row] * values; `num_values` is even
template <class T>
void add_values_in_place(const bf16* weights, int64_t num_rows, const T* const* values, int64_t num_values, int64_t width,
                         float* results, int64_t stride, SlotPrefetch& prefetch) {
    with_rows(num_rows, [&](auto rows) {
        constexpr int MR = rows.value;
        in_parts<(MR <= 2 ? 8 : 4)>(width / kLanes, [&](int64_t first, auto count) {
            auto right = [&](int64_t pair, int v) {
                int64_t column = (first + v) * kLanes;
                return interleaved(values[2 * pair] + column, values[2 * pair + 1] + column);
            };
            add_pairs<MR, count.value>(weights, kChunk, num_values / 2, false, results + first * kLanes, stride, right, prefetch);
        });
    });
}
#endif

}  // namespace
