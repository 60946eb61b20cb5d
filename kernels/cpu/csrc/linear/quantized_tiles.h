// Products of quantized columns with tiles (AMX). Codes are widened in memory, to pairs of bfloat16 or to bytes, and tiles load
// them from there. Used by linear_quantized.cpp and linear_bytes.cpp.
//
// A tile that is loaded from what has just been stored waits for the store. So codes are widened some steps before they are
// multiplied: a step of tiles and the widening of a later one run side by side, and neither waits for the other.
//
// What must always hold: as in quantized_product.h. A group's sum is that of its tiles, ascending, from 0: of floats, as
// pairs_amx.h has it; integers are exact.
#pragma once
#include "../vec/buffer.h"
#include "quantized_rows.h"
#include "../vec/tiles.h"

namespace {

constexpr int64_t kTileRowsAtOnce = 2 * Tiles::kRows;
constexpr int64_t kStepsAhead = 4;    // that codes are widened before they are multiplied
constexpr int64_t kGroupsAtOnce = 4;  // whose sums are scaled together
constexpr int64_t kUnitBytes = 8 * kLanes;  // of a panel, widened

// How tiles are multiplied, and what a product P makes of a sum; `kBias` says whether codes have a bias.
struct PairTiles {
    typedef PairProduct P;
    static constexpr bool kBias = false;
    static inline __attribute__((always_inline)) void add_upper() { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); }
    static inline __attribute__((always_inline)) void add_lower() { _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
};
struct BiasedByteTiles {
    typedef ByteProduct P;
    static constexpr bool kBias = true;
    static inline __attribute__((always_inline)) void add_upper() { _tile_dpbsud(0, 4, 6); _tile_dpbsud(1, 4, 7); }
    static inline __attribute__((always_inline)) void add_lower() { _tile_dpbsud(2, 5, 6); _tile_dpbsud(3, 5, 7); }
};
struct SignedByteTiles {
    typedef ByteProduct P;
    static constexpr bool kBias = false;
    static inline __attribute__((always_inline)) void add_upper() { _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); }
    static inline __attribute__((always_inline)) void add_lower() { _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7); }
};
// 4-bit codes without their bias, so that it need not be subtracted from each sum.
struct SignedCodes4 : ByteCodes4 {
    struct Loader : ByteCodes4::Loader {
        template <int i>
        void get(const Ints2& raw, Ints& low, Ints& high) const {
            ByteCodes4::Loader::get<i>(raw, low, high);
            Ints bias = splat_int(0x08080808);
            low = _mm512_sub_epi8(low, bias), high = _mm512_sub_epi8(high, bias);
        }
    };
};

// A panel in steps of as many units as a tile has, or as a group if that has fewer.
struct Steps {
    int64_t units, count, of_group;
    explicit Steps(const QuantizedMatrix& m, int64_t inputs) {
        int64_t all = m.padded_width() / inputs, group = m.num_groups == 1 ? all : m.group_size / inputs;
        units = std::min(Tiles::kRows, group), count = all / units, of_group = group / units;
    }
    // Whether groups consist of them.
    bool are_whole(const QuantizedMatrix& m, int64_t inputs) const { return count * units * inputs == m.padded_width() && count % of_group == 0; }
};

// Where a panel's steps are: widened, some of them in turn or all (a power of two); or as they are in the matrix.
struct WideSteps {
    uint8_t* p;
    int64_t kept, bytes;
    uint8_t* at(int64_t step) const { return p + (step & (kept - 1)) * bytes; }
};

// Scales the sums of some groups of up to kTileRowsAtOnce rows: totals = fma(scale, sum, totals), and likewise offsets.
template <class T, bool kOffsets>
void add_groups(const QuantizedMatrix& m, const PreparedRows& x, int64_t rows, int64_t panel, int64_t first, int64_t groups,
                const float* sums, float* totals) {
    typedef typename T::P P;
    for (int v = 0; v < 2; v++) {
        Vec scale[kGroupsAtOnce], offset[kGroupsAtOnce];
        for (int64_t g = 0; g < groups; g++) {
            scale[g] = load_shared(m, m.scales, panel, first + g, v);
            if (kOffsets) offset[g] = load_shared(m, m.offsets, panel, first + g, v);
        }
        for (int64_t r = 0; r < rows; r++) {
            float* total = totals + r * kPanel + v * kLanes;
            const float* of_x = x.sums(r) + first;
            [[maybe_unused]] const uint32_t* starts = x.starts(r, m) + first;
            Vec y = first == 0 ? splat(0) : load(total);
            for (int64_t g = 0; g < groups; g++) {
                typename P::Sum sum = P::kept(sums + (g * kTileRowsAtOnce + r) * kPanel + v * kLanes);
                if constexpr (T::kBias) sum = add(sum, P::start(starts + g));
                Vec value = P::value(sum, 0);
                if constexpr (P::kHasFactors) value = value * splat(of_x[m.num_groups + g]);
                y = fma(scale[g], value, y);
                if constexpr (kOffsets) {
                    Vec all_of_x = P::sum_of_x(of_x[g]);
                    if constexpr (P::kHasFactors) all_of_x = all_of_x * splat(of_x[m.num_groups + g]);
                    y = fma(offset[g], all_of_x, y);
                }
            }
            store(total, y);
        }
    }
}

// totals = up to kTileRowsAtOnce rows * a panel. Its codes are widened on the way (kWiden), or have been.
template <class C, class T, bool kLower, bool kWiden>
__attribute__((noinline)) void multiply_steps(const QuantizedMatrix& m, const PreparedRows& x, int64_t rows, int64_t panel,
                                              const Steps& steps, const WideSteps& wide, float* totals) {
    alignas(64) float sums[kGroupsAtOnce * kTileRowsAtOnce * kPanel];
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    int64_t x_bytes = x.stride * 4;
    auto widen_step = [&](int64_t step) __attribute__((always_inline)) {
        expand<C>(codes, step * steps.units, (step + 1) * steps.units, wide.at(step));
    };
    if (kWiden)
        for (int64_t step = 0; step < std::min(kStepsAhead, steps.count); step++) widen_step(step);
    for (int64_t step = 0, group = 0; step < steps.count; group++) {
        _tile_zero(0);
        _tile_zero(1);
        if (kLower) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t end = step + steps.of_group; step < end; step++) {
            if (kWiden && step + kStepsAhead < steps.count) widen_step(step + kStepsAhead);
            const uint8_t* right = wide.at(step);
            const uint32_t* left = x.p + step * steps.units;
            Tiles::compiler_barrier(right);
            _tile_loadd(6, right, kUnitBytes);
            _tile_loadd(7, right + kUnitBytes / 2, kUnitBytes);
            _tile_loadd(4, left, x_bytes);
            T::add_upper();
            if (kLower) {
                _tile_loadd(5, left + Tiles::kRows * x.stride, x_bytes);
                T::add_lower();
            }
        }
        float* to = sums + group % kGroupsAtOnce * kTileRowsAtOnce * kPanel;
        _tile_stored(0, to, kPanel * 4);
        _tile_stored(1, to + kLanes, kPanel * 4);
        if (kLower) {
            _tile_stored(2, to + Tiles::kRows * kPanel, kPanel * 4);
            _tile_stored(3, to + Tiles::kRows * kPanel + kLanes, kPanel * 4);
        }
        Tiles::compiler_barrier(sums);
        int64_t last = group % kGroupsAtOnce + 1;
        if (last < kGroupsAtOnce && step < steps.count) continue;
        if (m.offsets) add_groups<T, true>(m, x, rows, panel, group + 1 - last, last, sums, totals);
        else add_groups<T, false>(m, x, rows, panel, group + 1 - last, last, sums, totals);
    }
}

// Any number of rows by a panel: the first of them as its codes are widened, if they have to be.
template <class C, class T, bool kWidens>
void multiply_panel_in_steps(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel,
                             Tiles& tiles) {
    static thread_local Buffer<uint8_t> memory;
    alignas(64) float totals[kTileRowsAtOnce * kPanel];
    Steps steps(m, T::P::kInputs);
    WideSteps wide{const_cast<uint8_t*>(m.codes) + panel * m.panel_bytes(), 2 * kStepsAhead, steps.units * kUnitBytes};
    if (!kWidens || rows > kTileRowsAtOnce)
        while (wide.kept < steps.count) wide.kept *= 2;
    if (kWidens) {
        memory.resize(std::max<size_t>(memory.size(), wide.kept * wide.bytes));
        wide.p = memory.data();
    }
    for (int64_t done = 0, count; done < rows; done += count) {
        count = std::min(kTileRowsAtOnce, rows - done);
        PreparedRows some{x.p + (row + done) * x.stride, x.stride, x.sums_at};
        bool lower = tiles.configure(count, steps.units), widen = kWidens && done == 0;
        if (widen && lower) multiply_steps<C, T, true, true>(m, some, count, panel, steps, wide, totals);
        else if (widen) multiply_steps<C, T, false, true>(m, some, count, panel, steps, wide, totals);
        else if (lower) multiply_steps<C, T, true, false>(m, some, count, panel, steps, wide, totals);
        else multiply_steps<C, T, false, false>(m, some, count, panel, steps, wide, totals);
        finish_panel(op, row + done, count, panel, totals, kPanel);
    }
}

}  // namespace
