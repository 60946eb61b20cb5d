// Sums of bfloat16 products with AVX-512 BF16 (VDPBF16PS): one chain per sum, k ascending, in each pair the odd one first.
// Denormals are treated as 0. See pairs.h.
#pragma once
#include <utility>

#include "processor.h"

class Pairs {
public:
    // How many values are best multiplied at a time: sums stay in registers, and a panel in the second-level cache.
    static int64_t depth(int64_t) { return 128 * kPairStep; }

    // How many rows are best multiplied by a panel at a time: at the full depth of x they stay in the second-level cache.
    static constexpr bool kKeepsRows = false;
    static constexpr int64_t kRowsAtOnce = 128;
    static int64_t rows_together(int64_t) { return kRowsAtOnce; }
    static bool is_many(int64_t) { return false; }
    static int64_t slice(int64_t, int64_t num_k) { return num_k; }
    static int64_t panels_together(int64_t, int64_t) { return 4; }

    // Prefetches the next packed panel while several times kRows rows are multiplied by this one, a part of it with each of them:
    // all but the first of them find this panel in the caches, and memory would wait meanwhile.
    class Ahead {
    public:
        Ahead(const bf16* panel, const bf16* next, int64_t num_rows)
            : at_(reinterpret_cast<const char*>(num_rows > kRows ? next : panel)), step_(num_rows > kRows ? kPairBytes / parts(num_rows) : 0) {}

        // Returns what to prefetch with the first of so many values, and how many bytes further with each pair.
        std::pair<const char*, int64_t> take(int64_t num_k) {
            const char* from = at_;
            at_ += num_k / 2 * step_;
            return {from, step_};
        }

    private:
        static constexpr int64_t kPairBytes = 2 * kPanel * sizeof(bf16);
        const char* at_;
        int64_t step_;
    };

    struct Further {  // is added by itself
        const bf16* x;
        int64_t x_stride;
        const bf16* panel;
        int64_t num_k;
    };
    static constexpr bool kTakesFurther = false;

    // sums[row][0 .. kPanel) = (fresh ? 0 : sums) + x[row] * panel, over num_k values, an even number. Rows of x are
    // padded with 0 to a multiple of kPairStep.
    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride, Ahead& ahead, const Further* = nullptr, int64_t = 0) {
        int64_t num_parts = parts(num_rows);
        for (int64_t part = 0; part < num_parts; part++) {
            int64_t row = num_rows * part / num_parts, count = num_rows * (part + 1) / num_parts - row;
            const bf16* at = x + row * x_stride;
            float* to = sums + row * sums_stride;
            auto next = ahead.take(num_k);
            if (num_parts == 1 && num_rows > 1 && is_zen4()) add_some<kNothing>(count, at, x_stride, panel, num_k, fresh, to, sums_stride, next);
            else if (num_parts == 1) add_some<kAsRead>(count, at, x_stride, panel, num_k, fresh, to, sums_stride, next);
            else if (part == 0) add_some<kBoth>(count, at, x_stride, panel, num_k, fresh, to, sums_stride, next);
            else add_some<kNext>(count, at, x_stride, panel, num_k, fresh, to, sums_stride, next);
        }
    }

    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride) {
        Ahead none(panel.first, panel.first, 1);
        add(x, x_stride, num_rows, panel, num_k, fresh, sums, sums_stride, none);
    }

    void add_further(const Further& further, int64_t num_rows, float* sums, int64_t sums_stride) {
        add(further.x, further.x_stride, num_rows, packed(further.panel), further.num_k, false, sums, sums_stride);
    }

private:
    static constexpr int64_t kRows = 8;     // in registers: 8 x 2 sums, enough to hide the latency of additions
    // Bytes of weights to prefetch ahead, into the second-level cache: the first one can wait for too few lines at a time.
    static constexpr int64_t kAhead = 4096;

    static int64_t parts(int64_t num_rows) { return (num_rows + kRows - 1) / kRows; }

    // What is prefetched of packed panels. Zen 4 reads 2 to 8 rows' panels at memory's rate by itself, and prefetching 1 to 16 KiB
    // ahead slows that down (measured); one row's are read as fast either way.
    enum Prefetched { kNothing, kAsRead, kBoth, kNext };

    template <Prefetched kWhat, int64_t kStep>
    static void add_some(int64_t num_rows, const bf16* x, int64_t x_stride, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
                         int64_t sums_stride, std::pair<const char*, int64_t> next) {
        switch (num_rows) {
            case 1: return add_rows<1, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 2: return add_rows<2, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 3: return add_rows<3, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 4: return add_rows<4, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 5: return add_rows<5, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 6: return add_rows<6, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 7: return add_rows<7, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
            case 8: return add_rows<8, kWhat>(x, x_stride, panel, num_k, fresh, sums, sums_stride, next);
        }
    }

    template <int MR, Prefetched kWhat, int64_t kStep>
    __attribute__((noinline)) static void add_rows(const bf16* x, int64_t x_stride, Halves<kStep> panel, int64_t num_k, bool fresh,
                                                   float* sums, int64_t sums_stride, std::pair<const char*, int64_t> next) {
        auto [ahead, step] = next;
        Vec sum[MR][2];
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int v = 0; v < 2; v++) sum[m][v] = fresh ? splat(0) : load(sums + m * sums_stride + v * kLanes);
        for (int64_t k = 0; k < num_k; k += 2, ahead += step) {
            const bf16 *first = panel.at_first(k), *second = panel.at_second(k);
            if (kStep == kPacked && (kWhat == kAsRead || kWhat == kBoth)) {
                prefetch(reinterpret_cast<const char*>(first) + kAhead);
                prefetch(reinterpret_cast<const char*>(second) + kAhead);
            }
            if (kStep == kPacked && (kWhat == kBoth || kWhat == kNext)) prefetch(ahead);
            __m512i right[2] = {_mm512_loadu_si512(first), _mm512_loadu_si512(second)};
            UNROLL for (int m = 0; m < MR; m++) {
                int32_t pair;
                memcpy(&pair, x + m * x_stride + k, 4);
                __m512i left = _mm512_set1_epi32(pair);
                UNROLL for (int v = 0; v < 2; v++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], (__m512bh)left, (__m512bh)right[v]);
            }
        }
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int v = 0; v < 2; v++) store(sums + m * sums_stride + v * kLanes, sum[m][v]);
    }
};
