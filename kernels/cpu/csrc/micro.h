// The one matrix product of all kernels: rows of float32 times columns that a loader widens.
//
// Every result is one chain of fused multiply-adds, k ascending, started from 0 or from what stands in c. How many rows
// and columns a call holds in registers is a matter of speed only: it never shows in the bits.
#pragma once
#include <algorithm>

#include "vec.h"

constexpr int kPanel = 2 * kLanes;  // columns that lie side by side in a packed matrix
constexpr int kMaxRows = 6; // rows in registers: 6 x 16 results, with what they are made from, fill AVX2's sixteen

// Loaders give Vec number v (columns v * kLanes and on) of row k of the right-hand matrix; `kPaired` ones want two rows to be
// asked for together, the even one first. Of packed ones `kStart` 1 begins in the middle of a panel.

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

// Rows that lie anywhere: values of a paged cache
template <class T>
struct Rows {
    const T* const* rows;
    int64_t column;
    static constexpr bool kPaired = false;
    Vec even(int64_t k, int v) const { return load(rows[k] + column + v * kLanes); }
    Vec odd(int64_t k, int v) const { return even(k, v); }
    Rows columns(int64_t v) const { return {rows, column + v * kLanes}; }
};

// The left-hand matrix
struct PlainRows {
    const float* p;
    int64_t stride;
    const float* at(int m, int64_t k) const { return p + m * stride + k; }
};

// Where results go, and what is added to them at the end of the chain.
struct Target {
    float* c;
    int64_t stride;
    bool fresh;               // start from 0, not from c
    const float* bias;        // of these columns, or null
    const float* added;       // a matrix at the same place, or null
    int64_t added_stride;
    int64_t num_columns;      // that exist: fewer than a whole panel at the end of a matrix
    Target columns(int64_t v) const {
        int64_t n = v * kLanes;
        return {c + n, stride, fresh, bias ? bias + n : nullptr, added ? added + n : nullptr, added_stride, num_columns - n};
    }
    Target rows(int64_t m) const {
        return {c + m * stride, stride, fresh, bias, added ? added + m * added_stride : nullptr, added_stride, num_columns};
    }
};

// Unrolled before anything else, so that each element of an array becomes a register.
#define UNROLL _Pragma("GCC unroll 16")

// Memory that will be read next. `lines` cache lines of it are asked for with every kStride values of k: little at a
// time, so that memory is always busy and never overrun.
constexpr int64_t kStride = 16;
struct Ahead {
    const char* p;
    const char* end;
    int64_t lines;
    void ask() {
        const char* until = std::min(end, p + lines * 64);
        for (; p < until; p += 64) __builtin_prefetch(p, 0, 2);  // into the second-level cache: the first has few places to wait in
    }
};

// sums[v] += *left * right[v]; an instruction set may have a better one for some number.
template <int NV>
inline void accumulate_row(Vec (&sums)[NV], const Vec (&right)[NV], const float* left) {
    Vec l = splat_from(left);
    UNROLL for (int v = 0; v < NV; v++) sums[v] = accumulate(sums[v], l, right[v]);
}

// Never inlined: within a larger function the compiler has other uses for its registers.
template <int MR, int NV, bool kWhole, bool kAhead, class A, class B>
__attribute__((noinline)) static void multiply_in_registers(A a, B b, int64_t num_k, const Target& t, Ahead& ahead) {
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
    if constexpr (kAhead) {
        Ahead here = ahead;
        for (int64_t k = 0; k < num_k; k += kStride) {
            here.ask();
            steps(k, std::min(k + kStride, num_k));
        }
        ahead = here;
    } else {
        steps(0, num_k);
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
template <int MR, int NV, bool kWhole, class A, class B>
static void multiply_in_registers(A a, B b, int64_t num_k, const Target& t) {
    Ahead nothing{};
    multiply_in_registers<MR, NV, kWhole, false>(a, b, num_k, t, nothing);
}

// MR rows by `num_vecs` Vecs of columns, as many at once as registers allow.
template <int MR, class A, class B>
static void multiply_rows(A a, B b, int64_t num_k, int64_t num_vecs, const Target& t) {
    constexpr int wide = MR == 1 ? 8 : MR == 2 ? 4 : 2;
    int64_t v = 0;
    // enough of them that the next addition need not wait for the last
    for (; v + wide <= num_vecs && (v + wide) * kLanes <= t.num_columns; v += wide)
        multiply_in_registers<MR, wide, true>(a, b.columns(v), num_k, t.columns(v));
    if (MR == 1)
        for (; v + 4 <= num_vecs && (v + 4) * kLanes <= t.num_columns; v += 4)
            multiply_in_registers<MR, 4, true>(a, b.columns(v), num_k, t.columns(v));
    for (; v + 2 <= num_vecs; v += 2) {
        Target rest = t.columns(v);
        if (rest.num_columns >= kPanel) multiply_in_registers<MR, 2, true>(a, b.columns(v), num_k, rest);
        else multiply_in_registers<MR, 2, false>(a, b.columns(v), num_k, rest);
    }
    // a head of half a panel
    if (v < num_vecs) multiply_in_registers<MR, 1, true>(a, b.columns(v), num_k, t.columns(v));
}

// Up to kMaxRows rows.
template <class A, class B>
static void multiply(int64_t num_rows, A a, B b, int64_t num_k, int64_t num_vecs, const Target& t) {
    switch (num_rows) {
        case 1: return multiply_rows<1>(a, b, num_k, num_vecs, t);
        case 2: return multiply_rows<2>(a, b, num_k, num_vecs, t);
        case 3: return multiply_rows<3>(a, b, num_k, num_vecs, t);
        case 4: return multiply_rows<4>(a, b, num_k, num_vecs, t);
        case 5: return multiply_rows<5>(a, b, num_k, num_vecs, t);
        case 6: return multiply_rows<6>(a, b, num_k, num_vecs, t);
    }
}
