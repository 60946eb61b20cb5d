// Sums of bfloat16 products with AMX (TDPBF16PS). A tile of the left-hand side is up to 16 rows of 16 pairs, one of the
// right-hand side 16 pairs of 16 columns: a panel is two adjacent tiles. An instruction adds to a sum the sum of even
// products and the sum of odd products of its 16 pairs. Denormals are treated as 0. See pairs.h
// and tiles.h.
#pragma once
#include "tiles.h"

class Pairs {
public:
    static constexpr int64_t kRowsAtOnce = 2 * Tiles::kRows;

    // How many values are best multiplied at a time: of a panel that several times kRowsAtOnce rows are multiplied by, as many
    // as stay in the first-level cache beside the rows. Else all, so that sums need not leave their tiles.
    static int64_t depth(int64_t num_rows) { return num_rows > kRowsAtOnce ? 8 * kPairStep : 1 << 30; }

    // How a product is divided. Of many rows, such that what is used again stays in the second-level cache (2 MiB wherever there
    // are tiles): a slice of some rows, which some panels are multiplied by in turn, and the sums of all of them. So a panel is read
    // from memory once for all these rows. Panels of few rows are read once anyway.
    static constexpr bool kKeepsRows = true;
    static bool is_many(int64_t num_rows) { return num_rows > 4 * kRowsAtOnce; }
    static int64_t slice(int64_t num_rows, int64_t num_k) { return is_many(num_rows) ? std::min<int64_t>(num_k, 1024) : num_k; }
    static int64_t rows_together(int64_t slice) {
        return std::clamp<int64_t>(kKeptBytes / (2 * slice) / kRowsAtOnce, 4, 12) * kRowsAtOnce;
    }
    static int64_t panels_together(int64_t num_rows, int64_t num_k) {
        return is_many(num_rows) ? 16 : std::clamp<int64_t>(kPanelBytes / (num_k * kPanel * 2), 1, 4);
    }

    // Prefetches packed panels: what follows in the panel that all rows read at once, or else the next panel, while rows are
    // multiplied by this one.
    class Ahead {
    public:
        Ahead() = default;
        Ahead(const bf16* panel, const bf16* next, int64_t num_rows) {
            int64_t times = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
            at_ = times == 1 ? reinterpret_cast<const char*>(panel) + kBytes : reinterpret_cast<const char*>(next);
            lines_ = (kPairStep * kPanel * 2 / 64 + times - 1) / times;
        }
        void advance() {
            for (int64_t i = 0; i < lines_; i++, at_ += 64) prefetch(at_);
        }

    private:
        static constexpr int64_t kBytes = 12288;
        const char* at_ = nullptr;
        int64_t lines_ = 0;  // with each step
    };

    // A further product that is added to the same sums: rows padded with 0 to a multiple of kPairStep, and a packed panel, where as
    // much can be read, of finite numbers.
    struct Further {
        const bf16* x;
        int64_t x_stride;
        const bf16* panel;
        int64_t num_k;
    };
    static constexpr bool kTakesFurther = true;

    // sums[row][0 .. kPanel) = (fresh ? 0 : sums) + x[row] * panel, over num_k values, an even number, and then `further`. Rows of
    // x are padded with 0 to a multiple of kPairStep.
    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride, Ahead& ahead, const Further* further = nullptr, int64_t num_further = 0) {
        int64_t whole = num_k / kPairStep * kPairStep;
        alignas(64) bf16 rest[kPairStep * kPanel];  // the end of a panel that is not a multiple of a tile's depth, padded with zeros
        if (whole < num_k) memset(rest, 0, sizeof rest);
        for (int64_t k = whole; k < num_k; k += 2) {
            bf16* to = rest + (k - whole) * kPanel;
            memcpy(to, panel.at_first(k), 2 * kLanes * sizeof(bf16));
            memcpy(to + 2 * kLanes, panel.at_second(k), 2 * kLanes * sizeof(bf16));
        }
        for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
            int64_t count = std::min(kRowsAtOnce, num_rows - row);
            bool lower = tiles_.configure(count, kPairStep / 2);
            const bf16* at = x + row * x_stride;
            float* to = sums + row * sums_stride;
            const bf16* end = num_k > whole ? rest : nullptr;
            if (lower) add_tiles<true>(at, x_stride, panel, whole, end, fresh, to, sums_stride, ahead, further, num_further, row);
            else add_tiles<false>(at, x_stride, panel, whole, end, fresh, to, sums_stride, ahead, further, num_further, row);
        }
    }

    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride) {
        Ahead none;
        add(x, x_stride, num_rows, panel, num_k, fresh, sums, sums_stride, none);
    }

    // Adds a further product alone. Of a panel of few values, tiles hold no more than these: they read nothing that follows it.
    void add_further(const Further& further, int64_t num_rows, float* sums, int64_t sums_stride) {
        Ahead none;
        int64_t words = std::min(kPairStep, further.num_k) / 2;
        for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
            bool lower = tiles_.configure(std::min(kRowsAtOnce, num_rows - row), words);
            auto add = lower ? add_tiles<true, 2 * kPanel> : add_tiles<false, 2 * kPanel>;
            add(nullptr, 0, packed(further.panel), 0, nullptr, false, sums + row * sums_stride, sums_stride, none, &further, 1, row);
        }
    }

private:
    static constexpr int64_t kTileRows = Tiles::kRows, kKeptBytes = 800 << 10, kPanelBytes = 256 << 10;

    Tiles tiles_;

    // Sums in tiles 0 to 3, the left-hand side in 4 and 5, the right-hand side in 6 and 7.
    // A function of its own, so that all that its loop needs is in registers.
    template <bool kLower, int64_t kStep>
    __attribute__((noinline)) static void add_tiles(const bf16* x, int64_t x_stride, Halves<kStep> panel, int64_t whole,
                                                    const bf16* rest, bool fresh, float* sums, int64_t sums_stride, Ahead& ahead,
                                                    const Further* further, int64_t num_further, int64_t row) {
        int64_t sum_bytes = sums_stride * static_cast<int64_t>(sizeof(float));
        float* lower = sums + kTileRows * sums_stride;
        Tiles::compiler_barrier(rest);
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
        auto step = [&](const bf16* left, int64_t stride, auto right, int64_t k) __attribute__((always_inline)) {
            constexpr int64_t bytes = decltype(right)::kBytes;  // from one pair's columns to the next
            _tile_loadd(6, right.at_first(k), bytes);
            _tile_loadd(7, right.at_second(k), bytes);
            _tile_loadd(4, left, stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (kLower) {
                _tile_loadd(5, left + kTileRows * stride, stride * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        };
        for (int64_t k = 0; k < whole; k += kPairStep) {
            ahead.advance();
            step(x + k, x_stride, panel, k);
        }
        if (rest) step(x + whole, x_stride, packed(rest), 0);
        for (int64_t i = 0; i < num_further; i++) {
            const Further& f = further[i];
            for (int64_t k = 0; k < f.num_k; k += kPairStep) step(f.x + row * f.x_stride + k, f.x_stride, packed(f.panel), k);
        }
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + kLanes, sum_bytes);
        if (kLower) {
            _tile_stored(2, lower, sum_bytes);
            _tile_stored(3, lower + kLanes, sum_bytes);
        }
    }
};
