// The one matrix product of all kernels: rows of float32 times columns that a loader widens.
//
// Every result is one chain of fused multiply-adds, k ascending, started from 0 or from the value in c. How many rows and
// columns a call holds in registers only affects speed, never the bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vec.h"

constexpr int kPanel = 2 * kLanes;  // adjacent columns of a packed matrix
constexpr int kMaxRows = 6; // rows in registers: 6 x 16 results and their operands fill AVX2's sixteen registers

// Loaders return Vec number v (from column v * kLanes on) of row k of the right-hand matrix. From `kPaired` ones two rows
// must be loaded together, the even one first. Packed ones with `kStart` 1 begin in the middle of a panel.

// [panel][k][kPanel] float32
template <int kStart>
struct PackedF32From {
    const float* p;
    int64_t panel_stride;
    static constexpr bool kPaired = false;
    Vec even(int64_t k, int v) const {
        return load(p + (v + kStart) / 2 * panel_stride + k * kPanel + (v + kStart) % 2 * kLanes);
    }
    Vec odd(int64_t k, int v) const { return even(k, v); }
    PackedF32From columns(int64_t v) const { return {p + v / 2 * panel_stride, panel_stride}; }
    PackedF32From from(int64_t k) const { return {p + k * kPanel, panel_stride}; }
    PackedF32From<1> second_half() const { return {p, panel_stride}; }
};
typedef PackedF32From<0> PackedF32;

// [panel][k / 2][kPanel][2] bfloat16: a 32-bit word holds k (low half) and k + 1, which a shift and a mask widen
template <int kStart>
struct PackedBf16From {
    const bf16* p;
    int64_t panel_stride;
    static constexpr bool kPaired = true;
    const bf16* words(int64_t even_k, int v) const {
        return p + (v + kStart) / 2 * panel_stride + even_k * kPanel + (v + kStart) % 2 * 2 * kLanes;
    }
    Vec even(int64_t k, int v) const { return low_halves(words(k, v)); }
    Vec odd(int64_t k, int v) const { return high_halves(words(k - 1, v)); }
    PackedBf16From columns(int64_t v) const { return {p + v / 2 * panel_stride, panel_stride}; }
    PackedBf16From from(int64_t k) const { return {p + k * kPanel, panel_stride}; }
    PackedBf16From<1> second_half() const { return {p, panel_stride}; }
};
typedef PackedBf16From<0> PackedBf16;

// Scattered rows: values of a paged cache
template <class T>
struct Rows {
    const T* const* rows;
    int64_t column;
    static constexpr bool kPaired = false;
    Vec even(int64_t k, int v) const { return load(rows[k] + column + v * kLanes); }
    Vec odd(int64_t k, int v) const { return even(k, v); }
    Rows columns(int64_t v) const { return {rows, column + v * kLanes}; }
};

// Scattered rows of bfloat16; of every 2 * kLanes columns first the even and then the odd ones, which is cheaper to load.
struct RowHalves {
    const bf16* const* rows;
    int64_t column;
    static constexpr bool kPaired = false;
    Vec even(int64_t k, int v) const {
        const bf16* at = rows[k] + column + v / 2 * 2 * kLanes;
        return v % 2 ? high_halves(at) : low_halves(at);
    }
    Vec odd(int64_t k, int v) const { return even(k, v); }
    RowHalves columns(int64_t v) const { return {rows, column + v * kLanes}; }  // an even v
};

// The left-hand matrix
struct PlainRows {
    const float* p;
    int64_t stride;
    const float* at(int m, int64_t k) const { return p + m * stride + k; }
};

// Where results are stored, and what is added to them at the end of the chain.
struct Target {
    float* c;
    int64_t stride;
    bool fresh;               // start from 0, not from c
    const float* bias;        // of these columns, or null
    const float* added;       // a matrix of the same layout, or null
    int64_t added_stride;
    int64_t num_columns;      // valid columns: fewer than a whole panel at the end of a matrix
    Target columns(int64_t v) const {
        int64_t n = v * kLanes;
        return {c + n, stride, fresh, bias ? bias + n : nullptr, added ? added + n : nullptr, added_stride, num_columns - n};
    }
    Target rows(int64_t m) const {
        return {c + m * stride, stride, fresh, bias, added ? added + m * added_stride : nullptr, added_stride, num_columns};
    }
};

// Unrolled by templates, so that each element of an array becomes a register.
#ifndef UNROLL
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Prefetchers of the memory that will be read next: a product calls `advance` every kStride values of k, and each call
// prefetches a few lines, so that memory is always busy but never overloaded.
constexpr int64_t kStride = 16;
struct NoPrefetch {
    void advance() {}
};
// Prefetches `lines` cache lines per call, up to `end`.
struct LinePrefetch {
    const char* p;
    const char* end;
    int64_t lines;
    void advance() {
        const char* until = std::min(end, p + lines * 64);
        for (; p < until; p += 64) prefetch(p);
    }
};

// sums[v] += *left * right[v]; an instruction set may have a faster version for some counts.
template <int NV>
inline void accumulate_row(Vec (&sums)[NV], const Vec (&right)[NV], const float* left) {
    Vec l = splat_from(left);
    UNROLL for (int v = 0; v < NV; v++) sums[v] = accumulate(sums[v], l, right[v]);
}

// Never inlined: in a larger function the compiler would use registers for other values.
template <int MR, int NV, bool kWhole, class A, class B, class N>
__attribute__((noinline)) static void multiply_in_registers(A a, B b, int64_t num_k, const Target& t, N& next) {
    Vec acc[MR][NV];
    Mask mask[NV];
    UNROLL for (int v = 0; v < NV; v++) mask[v] = first_lanes(t.num_columns - v * kLanes);
    auto get = [&](const float* p, int v) __attribute__((always_inline)) { return kWhole ? load(p + v * kLanes) : load(p + v * kLanes, mask[v]); };
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) acc[m][v] = t.fresh ? splat(0) : get(t.c + m * t.stride, v);
    auto step = [&](int64_t k, bool odd) __attribute__((always_inline)) {
        if constexpr (NV <= 3) {
            Vec right[NV];
            UNROLL for (int v = 0; v < NV; v++) right[v] = odd ? b.odd(k, v) : b.even(k, v);
            UNROLL for (int m = 0; m < MR; m++) accumulate_row(acc[m], right, a.at(m, k));
        } else {
            Vec left[MR];
            UNROLL for (int m = 0; m < MR; m++) left[m] = splat_from(a.at(m, k));
            UNROLL for (int v = 0; v < NV; v++) {
                Vec right = odd ? b.odd(k, v) : b.even(k, v);
                UNROLL for (int m = 0; m < MR; m++) acc[m][v] = accumulate(acc[m][v], left[m], right);
            }
        }
    };
    auto steps = [&](int64_t k, int64_t end) __attribute__((always_inline)) {
        if (B::kPaired)
            for (; k + 2 <= end; k += 2) {
                step(k, false);
                step(k + 1, true);
            }
        for (; k < end; k++) step(k, false);
    };
    if constexpr (std::is_same_v<N, NoPrefetch>) {
        steps(0, num_k);
    } else {
        N here = next;
        for (int64_t k = 0; k < num_k; k += kStride) {
            here.advance();
            steps(k, std::min(k + kStride, num_k));
        }
        next = here;
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++) {
            Vec y = acc[m][v];
            if (t.bias) y = y + get(t.bias, v);
            if (t.added) y = get(t.added + m * t.added_stride, v) + y;
            if (kWhole) store(t.c + m * t.stride + v * kLanes, y);
            else store(t.c + m * t.stride + v * kLanes, mask[v], y);
        }
}
// At most six rows at a time, evenly: 8 are 4 and 4, not 6 and 2.
inline int64_t num_parts(int64_t num_rows) { return (num_rows + kMaxRows - 1) / kMaxRows; }
inline int64_t split(int64_t num_rows, int64_t index) { return num_rows * index / num_parts(num_rows); }

// Calls go<MR>() for this many rows.
template <class F>
static void with_rows(int64_t num_rows, F go) {
    switch (num_rows) {
        case 1: return go(std::integral_constant<int, 1>{});
        case 2: return go(std::integral_constant<int, 2>{});
        case 3: return go(std::integral_constant<int, 3>{});
        case 4: return go(std::integral_constant<int, 4>{});
        case 5: return go(std::integral_constant<int, 5>{});
        case 6: return go(std::integral_constant<int, 6>{});
    }
}

// Up to kMaxRows rows by `num_vecs` whole Vecs of columns; for one or two rows kFew of them at once, so that there are enough
// independent sums to hide the latency of additions.
template <int kFew, class A, class B, class N>
static void multiply(int64_t num_rows, A a, B b, int64_t num_k, int64_t num_vecs, const Target& t, N& next) {
    with_rows(num_rows, [&](auto rows) {
        constexpr int MR = rows.value;
        int64_t v = 0;
        if constexpr (MR <= 2 && kFew > 2) {
            for (; v + kFew <= num_vecs; v += kFew) multiply_in_registers<MR, kFew, true>(a, b.columns(v), num_k, t.columns(v), next);
            if (kFew > 4 && v + 4 <= num_vecs) {
                multiply_in_registers<MR, 4, true>(a, b.columns(v), num_k, t.columns(v), next);
                v += 4;
            }
        }
        for (; v + 2 <= num_vecs; v += 2) multiply_in_registers<MR, 2, true>(a, b.columns(v), num_k, t.columns(v), next);
        // a head of half a panel
        if (v < num_vecs) multiply_in_registers<MR, 1, true>(a, b.columns(v), num_k, t.columns(v), next);
    });
}
