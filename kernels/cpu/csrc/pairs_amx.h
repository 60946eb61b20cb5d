// Sums of bfloat16 products with AMX (TDPBF16PS). A tile of the left-hand side is up to 16 rows of 16 pairs, one of the
// right-hand side 16 pairs of 16 columns: a panel is two adjacent tiles. An instruction adds to a sum the sum of even
// products and the sum of odd products of its 16 pairs. Denormals are treated as 0. See pairs.h.
//
// What must always hold: tiles belong to a thread and are released before the thread leaves `linear`; the process has
// requested them from the system (../instruction_sets.py).
#pragma once

class Pairs {
public:
    Pairs() = default;
    Pairs(const Pairs&) = delete;
    Pairs& operator=(const Pairs&) = delete;
    ~Pairs() {
        if (upper_) _tile_release();
    }

    // sums[row][0 .. kPanel) = (fresh ? 0 : sums) + x[row] * panel, over num_k values, an even number. Rows of x are
    // padded with 0 to a multiple of kPairStep.
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, const bf16* panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride) {
        int64_t whole = num_k / kPairStep * kPairStep;
        alignas(64) bf16 rest[kPairStep * kPanel];  // the end of a panel that is not a multiple of a tile's depth, padded with zeros
        if (whole < num_k) {
            memcpy(rest, panel + whole * kPanel, (num_k - whole) * kPanel * sizeof(bf16));
            memset(rest + (num_k - whole) * kPanel, 0, (kPairStep - num_k + whole) * kPanel * sizeof(bf16));
        }
        for (int64_t row = 0; row < num_rows; row += 2 * kTileRows) {
            int64_t count = std::min(2 * kTileRows, num_rows - row);
            configure(std::min(kTileRows, count), std::max<int64_t>(0, count - kTileRows));
            const bf16* at = x + row * x_stride;
            float* to = sums + row * sums_stride;
            if (lower_) add_tiles<true>(at, x_stride, panel, whole, num_k > whole ? rest : nullptr, fresh, to, sums_stride);
            else add_tiles<false>(at, x_stride, panel, whole, num_k > whole ? rest : nullptr, fresh, to, sums_stride);
        }
    }

private:
    static constexpr int64_t kTileRows = 16;
    static constexpr int64_t kAhead = 12288;  // bytes of weights to prefetch ahead
    static constexpr int64_t kPanelBytes = kPanel * 2 * sizeof(bf16);  // from one pair's columns to the next

    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_a_row[16] = {};
        uint8_t rows[16] = {};
    };

    // Compilers' intrinsics for tiles do not declare the memory that they read (GCC 12: 8 of the 64 bytes of a configuration,
    // nothing of a tile): without this barrier, earlier stores might be reordered or eliminated.
    static void compiler_barrier(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

    int64_t upper_ = 0, lower_ = 0;  // rows of the upper tiles (0, 1, 4) and of the lower ones (2, 3, 5)

    void configure(int64_t upper, int64_t lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            bool right = tile >= 6, low = tile == 2 || tile == 3 || tile == 5;
            // an unused tile has one row, because zero rows are not a valid shape
            config.rows[tile] = static_cast<uint8_t>(right ? kTileRows : std::max<int64_t>(1, low ? lower : upper));
            config.bytes_a_row[tile] = 64;
        }
        compiler_barrier(&config);
        _tile_loadconfig(&config);
    }

    // Sums in tiles 0 to 3, the left-hand side in 4 and 5, the right-hand side in 6 and 7.
    template <bool kLower>
    static void add_tiles(const bf16* x, int64_t x_stride, const bf16* panel, int64_t whole, const bf16* rest, bool fresh,
                          float* sums, int64_t sums_stride) {
        int64_t sum_bytes = sums_stride * static_cast<int64_t>(sizeof(float));
        float* lower = sums + kTileRows * sums_stride;
        compiler_barrier(rest);
        if (fresh) {
            _tile_zero(0);
            _tile_zero(1);
            if (kLower) {
                _tile_zero(2);
                _tile_zero(3);
            }
        } else {
            _tile_loadd(0, sums, sum_bytes);
            _tile_loadd(1, sums + kLanes, sum_bytes);
            if (kLower) {
                _tile_loadd(2, lower, sum_bytes);
                _tile_loadd(3, lower + kLanes, sum_bytes);
            }
        }
        auto step = [&](const bf16* left, const bf16* right) __attribute__((always_inline)) {
            _tile_loadd(6, right, kPanelBytes);
            _tile_loadd(7, right + 2 * kLanes, kPanelBytes);
            _tile_loadd(4, left, x_stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (kLower) {
                _tile_loadd(5, left + kTileRows * x_stride, x_stride * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        };
        for (int64_t k = 0; k < whole; k += kPairStep) {
            const bf16* right = panel + k * kPanel;
            // few rows: the weights are read from memory
            if (!kLower)
                for (int64_t i = 0; i < kPairStep * kPanel * 2; i += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(right) + kAhead + i, _MM_HINT_T0);
            step(x + k, right);
        }
        if (rest) step(x + whole, rest);
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + kLanes, sum_bytes);
        if (kLower) {
            _tile_stored(2, lower, sum_bytes);
            _tile_stored(3, lower + kLanes, sum_bytes);
        }
    }
};
