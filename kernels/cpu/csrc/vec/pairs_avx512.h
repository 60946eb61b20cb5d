// Sums of bfloat16 products with AVX-512 BF16 (VDPBF16PS): one chain per sum, k ascending, in each pair the odd one first.
// Denormals are treated as 0. See pairs.h.
#pragma once

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

    struct Ahead {  // panels are prefetched as they are read
        Ahead(const bf16*, const bf16*, int64_t) {}
    };

    // sums[row][0 .. kPanel) = (fresh ? 0 : sums) + x[row] * panel, over num_k values, an even number. Rows of x are
    // padded with 0 to a multiple of kPairStep.
    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride) {
        int64_t parts = (num_rows + kRows - 1) / kRows;
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = num_rows * part / parts, count = num_rows * (part + 1) / parts - row;
            const bf16* at = x + row * x_stride;
            float* to = sums + row * sums_stride;
            switch (count) {
                case 1: add_rows<1>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 2: add_rows<2>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 3: add_rows<3>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 4: add_rows<4>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 5: add_rows<5>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 6: add_rows<6>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 7: add_rows<7>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
                case 8: add_rows<8>(at, x_stride, panel, num_k, fresh, to, sums_stride); break;
            }
        }
    }

    struct Further {  // is added by itself
        const bf16* x;
        int64_t x_stride;
        const bf16* panel;
        int64_t num_k;
    };
    static constexpr bool kTakesFurther = false;

    template <int64_t kStep>
    void add(const bf16* x, int64_t x_stride, int64_t num_rows, Halves<kStep> panel, int64_t num_k, bool fresh, float* sums,
             int64_t sums_stride, Ahead&, const Further* = nullptr, int64_t = 0) {
        add(x, x_stride, num_rows, panel, num_k, fresh, sums, sums_stride);
    }

    void add_further(const Further& further, int64_t num_rows, float* sums, int64_t sums_stride) {
        add(further.x, further.x_stride, num_rows, packed(further.panel), further.num_k, false, sums, sums_stride);
    }

private:
    static constexpr int64_t kRows = 8;     // in registers: 8 x 2 sums, enough to hide the latency of additions
    // Bytes of weights to prefetch ahead, into the second-level cache: the first one can wait for too few lines at a time.
    static constexpr int64_t kAhead = 4096;

    template <int MR, int64_t kStep>
    __attribute__((noinline)) static void add_rows(const bf16* x, int64_t x_stride, Halves<kStep> panel, int64_t num_k, bool fresh,
                                                   float* sums, int64_t sums_stride) {
        Vec sum[MR][2];
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int v = 0; v < 2; v++) sum[m][v] = fresh ? splat(0) : load(sums + m * sums_stride + v * kLanes);
        for (int64_t k = 0; k < num_k; k += 2) {
            const bf16 *first = panel.at_first(k), *second = panel.at_second(k);
            if (kStep == kPacked) {
                prefetch(reinterpret_cast<const char*>(first) + kAhead);
                prefetch(reinterpret_cast<const char*>(second) + kAhead);
            }
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
