// Products of a few query rows with keys and values where they are in the cache: a step that decodes reads each of them once, so
// packing a copy for `Pairs` would cost more than the product. Used by attention_in_place.h.
//
// Each product prefetches `ahead` as it proceeds: line by line of several parts at once, since one stream, or all lines in one
// go, would keep fewer reads in flight (measured).
//
// What must always hold: the bits are those of `Pairs::add` over a packed copy: with AVX-512 BF16 one chain per sum, k
// ascending; with AMX the chains of tiles, computed with the instructions for vectors.
#pragma once
#include "attention.h"
#include "../vec/pairs.h"
#include "../vec/processor.h"

namespace {

// Interleaves 16 integers of two rows as pairs of bfloat16. Their float32 have nothing in the lower half.
inline __m512i interleaved(const int8_t* even, const int8_t* odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(load(even)), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(load(odd)));
}

inline __m512i interleaved(const bf16* even, const bf16* odd) {
    auto words = [](const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); };
    return _mm512_or_si512(words(even), _mm512_slli_epi32(words(odd), 16));
}

#ifdef QUIPU_AMX
#include "chains_amx.h"
#else
#include "chains_avx512.h"
#endif

constexpr int64_t kTogether = 8;  // parts of kSlots slots that are read, or prefetched, at the same time
constexpr int64_t kPartsOfChain = kValueSlots / kSlots;

// The bytes of one pair, k and k + 1, of so many columns.
template <class T>
constexpr int64_t pair_bytes(int64_t columns) { return columns * 2 * static_cast<int64_t>(sizeof(T)); }

// A panel of keys, the queries that it is multiplied with, and where their scores go.
template <class T>
struct KeyPart {
    const T* panel;
    const Query* queries;
    float* scores;
    const char* ahead;  // what is prefetched while this is multiplied
};

// scores[row * kScoreStride ..] = queries[row] * the keys of each panel; panels are independent, so their sums hide the latency of
// additions.
template <int MR, int NP, class T>
__attribute__((noinline)) void multiply_keys(const KeyPart<T>* parts, int64_t stride, int64_t num_pairs) {
    for (int64_t first = 0, last; first < num_pairs; first = last) {
        last = std::min(num_pairs, first + Chain::kPairs);
        Chain sum[NP][MR];
        UNROLL for (int p = 0; p < NP; p++)
            UNROLL for (int m = 0; m < MR; m++) sum[p][m].start(parts[p].scores + m * kScoreStride, first == 0);
        for (int64_t pair = first; pair < last; pair++)
            UNROLL for (int p = 0; p < NP; p++) {
                Pair right = key_pair(parts[p].panel, pair);
                if (pair * pair_bytes<T>(kSlots) % 64 == 0) prefetch(parts[p].ahead + pair * pair_bytes<T>(kSlots));
                UNROLL for (int m = 0; m < MR; m++) sum[p][m].add(same_pair(parts[p].queries + m * stride + 2 * pair), right);
            }
        UNROLL for (int p = 0; p < NP; p++)
            UNROLL for (int m = 0; m < MR; m++) sum[p][m].finish(parts[p].scores + m * kScoreStride, first == 0);
    }
}

// results[row][column ..] += weights[row] * the values of kValueSlots slots, in NV vectors of columns. With each pair of slots, as
// many bytes of the kTogether parts in `ahead` are prefetched, from `at` on: a line of each in turn, or of integers some of one.
template <int MR, int NV, class T>
__attribute__((noinline)) void multiply_values(const bf16* weights, const T* const* slots, int64_t column, int64_t width, float* results,
                                               int64_t stride, const char* const* ahead, int64_t at) {
    Chain sum[MR][NV];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) sum[m][v].start(results + m * stride + v * kLanes, false);
    for (int64_t pair = 0; pair < kValueSlots / 2; pair++) {
        const T *even = slots[2 * pair] + column, *odd = slots[2 * pair + 1] + column;
        if constexpr (sizeof(T) == 1) {  // finding each line's part would take longer than memory
            const char* next = ahead[pair % kTogether] + at + pair / kTogether * pair_bytes<T>(width) + pair_bytes<T>(column);
            UNROLL for (int64_t i = 0; i < pair_bytes<T>(NV * kLanes); i += 64) prefetch(next + i);
        } else {
            UNROLL for (int64_t i = 0; i < pair_bytes<T>(NV * kLanes); i += 64) {
                int64_t line = (pair * pair_bytes<T>(width) + pair_bytes<T>(column) + i) / 64;
                prefetch(ahead[line % kTogether] + at + line / kTogether * 64);
            }
        }
        Pair left[MR];
        UNROLL for (int m = 0; m < MR; m++) left[m] = same_pair(weights + m * kWeightStride + 2 * pair);
        UNROLL for (int v = 0; v < NV; v++) {
            Pair right = value_pair(even + v * kLanes, odd + v * kLanes);
            UNROLL for (int m = 0; m < MR; m++) sum[m][v].add(left[m], right);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) sum[m][v].finish(results + m * stride + v * kLanes, false);
}

// Calls go(first, N) for parts of `count`, as large as registers allow for this many rows.
template <int MR, class F>
void in_parts(int64_t count, F go) {
    constexpr int kWidest = (MR <= 2 ? 8 : 4) / Chain::kSums;
    int64_t first = 0;
    for (; first + kWidest <= count; first += kWidest) go(first, std::integral_constant<int, kWidest>{});
    for (; first + 2 <= count; first += 2) go(first, std::integral_constant<int, 2>{});
    if (first < count) go(first, std::integral_constant<int, 1>{});
}

// `are_run`: the parts are adjacent in memory.
template <class T>
void add_keys_in_place(const KeyPart<T>* parts, int64_t num_parts, bool are_run, int64_t stride, int64_t num_rows, int64_t width) {
    ChainMode mode;
    // With Zen 5, memory delivers a tenth to a fifth more if the parts of a long run are read one after the other. Others keep more
    // reads in flight if a line of each of several parts is read in turn (measured with Zen 4).
    bool in_turn = sizeof(T) == 2 && are_run && is_zen5();
    with_rows(num_rows, [&](auto rows) {
        if (in_turn) {
            for (int64_t i = 0; i < num_parts; i++) multiply_keys<rows.value, 1>(parts + i, stride, width / 2);
            return;
        }
        in_parts<rows.value>(num_parts, [&](int64_t first, auto count) {
            multiply_keys<rows.value, count.value>(parts + first, stride, width / 2);
        });
    });
}

// `index` is that of the chain among those that are read at the same time.
template <class T>
void add_values_in_place(const bf16* weights, int64_t num_rows, const T* const* slots, int64_t width, float* results, int64_t stride,
                         const char* const* ahead, int64_t index) {
    ChainMode mode;
    with_rows(num_rows, [&](auto rows) {
        in_parts<rows.value>(width / kLanes, [&](int64_t first, auto count) {
            int64_t column = first * kLanes, at = index * kPartsOfChain * pair_bytes<T>(width);
            multiply_values<rows.value, count.value>(weights, slots, column, width, results + column, stride, ahead, at);
        });
    });
}

}  // namespace
