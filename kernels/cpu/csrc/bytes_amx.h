// Sums of byte products with AMX (TDPBSUD): signed bytes of x times unsigned codes, in 32 bits. They are exact, so few rows may
// take the vector instruction instead. See tiles.h.
#pragma once
#include <cstring>

#include "quantized_codes.h"
#include "tiles.h"

class ByteTiles {
public:
    static constexpr int64_t kRowsAtOnce = 2 * Tiles::kRows;

    // sums[row][0 .. kPanel) = x[row] * codes, for up to kRowsAtOnce rows; `units` words of each row, of codes as ByteCodes8 has
    // them. If more than 16 words are not a multiple of 16, x has zeros after them.
    void multiply(const uint32_t* x, int64_t stride, int64_t num_rows, const uint8_t* codes, int64_t units, int32_t* sums) {
        int64_t depth = std::min<int64_t>(Tiles::kRows, units), whole = units / depth * depth;
        alignas(64) uint8_t rest[Tiles::kRows * kUnitBytes];  // a tile that would reach beyond the panel
        if (whole < units) {
            memcpy(rest, codes + whole * kUnitBytes, (units - whole) * kUnitBytes);
            memset(rest + (units - whole) * kUnitBytes, 0, (depth - units + whole) * kUnitBytes);
        }
        bool lower = tiles_.configure(num_rows, depth);
        Tiles::compiler_barrier(codes);
        Tiles::compiler_barrier(rest);
        if (lower) add<true>(x, stride, codes, whole, depth, whole < units ? rest : nullptr, sums);
        else add<false>(x, stride, codes, whole, depth, whole < units ? rest : nullptr, sums);
        Tiles::compiler_barrier(sums);
    }

private:
    static constexpr int64_t kUnitBytes = 2 * ByteCodes8::kBytes;
    Tiles tiles_;

    template <bool kLower>
    static void add(const uint32_t* x, int64_t stride, const uint8_t* codes, int64_t whole, int64_t depth, const uint8_t* rest,
                    int32_t* sums) {
        constexpr int64_t sum_bytes = kPanel * sizeof(int32_t);
        _tile_zero(0);
        _tile_zero(1);
        if (kLower) {
            _tile_zero(2);
            _tile_zero(3);
        }
        auto step = [&](const uint32_t* left, const uint8_t* right) __attribute__((always_inline)) {
            _tile_loadd(6, right, kUnitBytes);
            _tile_loadd(7, right + ByteCodes8::kBytes, kUnitBytes);
            _tile_loadd(4, left, stride * 4);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if (kLower) {
                _tile_loadd(5, left + Tiles::kRows * stride, stride * 4);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        };
        for (int64_t unit = 0; unit < whole; unit += depth) step(x + unit, codes + unit * kUnitBytes);
        if (rest) step(x + whole, rest);
        int32_t* lower = sums + Tiles::kRows * kPanel;
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + kLanes, sum_bytes);
        if (kLower) {
            _tile_stored(2, lower, sum_bytes);
            _tile_stored(3, lower + kLanes, sum_bytes);
        }
    }
};
