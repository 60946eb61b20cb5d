// The shapes of AMX tiles. pairs_amx.h and quantized_tiles.h use eight of them alike: sums in 0 to 3 (rows of the first sixteen in
// 0 and 1, of the next in 2 and 3), the left-hand side in 4 and 5, the right-hand side in 6 and 7.
//
// What must always hold: tiles belong to a thread and are released before the thread leaves the outermost product; the process has
// requested them from the system (../../instruction_sets.py).
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

class Tiles {
public:
    static constexpr int64_t kRows = 16;

    Tiles() { state_.users++; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (--state_.users == 0 && state_.upper) {
            _tile_release();
            state_.upper = 0;
        }
    }

    // Compilers' intrinsics for tiles do not declare the memory that they read (GCC 12: 8 of the 64 bytes of a configuration,
    // nothing of a tile): without this barrier, earlier stores might be reordered or eliminated.
    static void compiler_barrier(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

    // `words` 32-bit words of each row of the left-hand side are as many rows of the right-hand side. Returns whether there
    // are lower rows.
    bool configure(int64_t num_rows, int64_t words) {
        int64_t upper = std::min(kRows, num_rows), lower = std::max<int64_t>(0, num_rows - kRows);
        if (upper == state_.upper && lower == state_.lower && words == state_.words) return lower > 0;
        state_.upper = upper, state_.lower = lower, state_.words = words;
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            bool right = tile >= 6, left = tile == 4 || tile == 5, low = tile == 2 || tile == 3 || tile == 5;
            // an unused tile has one row, because zero rows are not a valid shape
            config.rows[tile] = static_cast<uint8_t>(right ? words : std::max<int64_t>(1, low ? lower : upper));
            config.bytes_a_row[tile] = static_cast<uint16_t>(left ? 4 * words : 64);
        }
        compiler_barrier(&config);
        _tile_loadconfig(&config);
        return lower > 0;
    }

private:
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_a_row[16] = {};
        uint8_t rows[16] = {};
    };
    // What this thread's tiles are configured for. Products that run within one another take turns in using them.
    struct State {
        int64_t users, upper, lower, words;
    };
    static State& of_thread() {
        static thread_local State state{};
        return state;
    }
    State& state_ = of_thread();
};
