// The matrix product with quantized columns: prepared rows of x times the codes of a panel, group by group.
//
// What must always hold: a result is one chain: for each group, ascending, total = fma(scale, sum, total), then
// total = fma(offset, sum of x, total) if there are offsets. A group's sum is a chain of its units, ascending, from 0. How
// many rows and panels a call holds in registers, and where it is interrupted, affects speed only.
#pragma once
#include "../vec/processor.h"
#include "quantized_codes.h"

// Rows of x, as words of a product's units and then the sum of each group's inputs. Of bytes, this is an integer, each group's
// scale follows, and then the integer that its sums of products start from, so that the bias of codes need not be subtracted.
struct PreparedRows {
    const uint32_t* p;
    int64_t stride;      // words
    int64_t sums_at;
    const float* sums(int64_t row) const { return reinterpret_cast<const float*>(p + row * stride + sums_at); }
    const uint32_t* starts(int64_t row, const QuantizedMatrix& m) const { return p + row * stride + sums_at + 2 * m.num_groups; }
};

// Panels of codes: those of the matrix, or expanded ones.
struct Columns {
    const QuantizedMatrix* matrix;
    int64_t panel;        // the first one, for its scales
    const uint8_t* codes; // from unit 0 on
    int64_t stride;       // bytes from panel to panel
    const uint8_t* ahead = nullptr;  // what is prefetched with unit 0, and how many bytes further with each block; null: what is read
    int64_t ahead_step = 0;
    int64_t until_next = 1;  // panels to the one that the thread multiplies next, whose first codes are prefetched with the last ones here
};

// What a call has of each row, for all its panels: `totals` of groups that are complete, and the sum of one that is not
// (`partial`, which is null where groups are never interrupted).
struct Sums {
    float* totals;
    float* partial;
};

// Hides from the compiler where a pointer comes from. Else it keeps an address in a register for each row, more than there are.
template <class T>
inline __attribute__((always_inline)) T* hidden(T* p) {
    asm("" : "+r"(p));
    return p;
}

constexpr int64_t kCodesAhead = 4096;  // bytes of codes to prefetch ahead; twice as many where rows are multiplied in between
// The same for MR rows. One or two read four panels at a time: with 16 lanes, half as many are enough.
template <int MR>
constexpr int64_t kAheadOfRows = kLanes == 16 && MR <= 2 ? kCodesAhead / 2 : kCodesAhead;
constexpr int kPanelsTogether = kLanes == 8 ? 2 : 4;  // whose codes are in registers at a time, beside the sums of all

// Whether MR rows take at most 8 products per line of codes, so that they mostly wait for memory. Then lines are prefetched into
// the second-level cache, since the first one can wait for too few at a time; with more products, for its latency. With Zen 5, one
// or two rows are 1.01 to 1.05 times as fast with the first one.
template <class C, int MR>
constexpr bool is_reading = MR * 64 * C::kUnits <= 8 * C::kBytes;

// Calls go with each index below N, known to the compiler.
template <int N, class F, int i = 0>
inline __attribute__((always_inline)) void for_each_unit(F go) {
    if constexpr (i < N) {
        go(std::integral_constant<int, i>{});
        for_each_unit<N, F, i + 1>(go);
    }
}

// MR rows by NP panels, units from `first` to `last`. `kNext`: whether columns say what is prefetched.
template <class C, int MR, int NP, bool kNext>
__attribute__((noinline)) static void multiply_rows(const PreparedRows& x, const Columns& columns, int64_t first, int64_t last,
                                                    const Sums& sums) {
    typedef typename C::Product P;
    constexpr int NV = 2 * NP, kTogether = std::min(NP, kPanelsTogether);
    // copies, because the compiler must assume that storing a total changes the originals
    const QuantizedMatrix matrix = *columns.matrix;
    const int64_t panel = columns.panel, panel_stride = columns.stride, x_stride = x.stride;
    const uint32_t* const words = x.p;
    const uint8_t* const panel_codes = columns.codes;
    const uint8_t* next = columns.ahead + first / C::kUnits * columns.ahead_step;
    const int64_t next_step = columns.ahead_step;
    const int64_t panel_bytes = matrix.panel_bytes(), skipped = (columns.until_next - 1) * panel_bytes;
    constexpr int64_t kAhead = kAheadOfRows<MR>;
    const uint8_t* const last_codes = panel_codes + panel_bytes - kAhead;
    const bool to_first = !is_reading<C, MR> || (kAhead < kCodesAhead && is_zen5());
    const float* const sums_of_x = x.sums(0);
    const uint32_t* const starts = x.starts(0, matrix);
    float* const totals = sums.totals;
    float* const partial = sums.partial;
    const typename C::Loader codes;
    const int64_t num_units = matrix.padded_width() / P::kInputs;
    const int64_t group_units = matrix.num_groups == 1 ? num_units : matrix.group_size / P::kInputs;
    for (int64_t unit = first, end; unit < last; unit = end) {
        int64_t group = unit / group_units;
        end = std::min(last, (group + 1) * group_units);
        bool fresh = unit == group * group_units;
        typename P::Sum sum[MR][NV];
        const uint32_t* start = starts + group;
        UNROLL for (int m = 0; m < MR; m++, start = hidden(start + x_stride)) {
            UNROLL for (int v = 0; v < NV; v++) sum[m][v] = fresh ? P::start(start) : P::kept(partial + (m * NV + v) * kLanes);
        }
        const uint8_t* at = panel_codes + unit / C::kUnits * 2 * C::kBytes;
        const uint32_t* thirds[(MR + 2) / 3];  // of rows: an address is one of these plus the stride, once or twice
        UNROLL for (int m = 0; m < MR; m += 3) thirds[m / 3] = words + unit + m * x_stride;
        for (int64_t blocks = (end - unit) / C::kUnits; blocks > 0; blocks--, at += 2 * C::kBytes, next += next_step) {
            if constexpr (MR > 2)  // fewer have registers enough
                UNROLL for (int m = 0; m < MR; m += 3) thirds[m / 3] = hidden(thirds[m / 3]);
            const int64_t ahead = at < last_codes ? kAhead : kAhead + skipped;
            UNROLL for (int done = 0; done < NP; done += kTogether) {
                decltype(codes.load(at)) raw[kTogether];
                UNROLL for (int n = 0; n < kTogether; n++) {
                    const uint8_t* p = at + (done + n) * panel_stride;
                    for (int line = 0; line < 2 * C::kBytes; line += 64) {
                        if constexpr (kNext) prefetch(next + line);
                        else if (to_first) prefetch_first(p + ahead + line);
                        else prefetch(p + ahead + line);
                    }
                    raw[n] = codes.load(p);
                }
                for_each_unit<C::kUnits>([&](auto i) __attribute__((always_inline)) {
                    typename P::Right right[2 * kTogether];
                    UNROLL for (int n = 0; n < kTogether; n++) codes.template get<i.value>(raw[n], right[2 * n], right[2 * n + 1]);
                    UNROLL for (int m = 0; m < MR; m++)
                        P::add_row(&sum[m][2 * done], thirds[m / 3] + m % 3 * x_stride + i.value, right);
                });
            }
            UNROLL for (int m = 0; m < MR; m += 3) thirds[m / 3] += C::kUnits;
        }
        if (end < (group + 1) * group_units) {
            UNROLL for (int m = 0; m < MR; m++)
                UNROLL for (int v = 0; v < NV; v++) P::keep(partial + (m * NV + v) * kLanes, sum[m][v]);
            return;
        }
        auto add_group = [&](auto is_first, auto has_offsets) __attribute__((always_inline)) {
            Vec scales[NV], offsets[NV];
            UNROLL for (int v = 0; v < NV; v++) {
                scales[v] = load_shared(matrix, matrix.scales, panel + v / 2, group, v % 2);
                if (has_offsets) offsets[v] = load_shared(matrix, matrix.offsets, panel + v / 2, group, v % 2);
            }
            const float* of_x = sums_of_x + group;
            UNROLL for (int m = 0; m < MR; m++, of_x = hidden(of_x + x_stride)) {
                float sum_of_x = P::kNeedsSums || has_offsets ? *of_x : 0;
                Vec all_of_x = P::sum_of_x(sum_of_x), factor = splat(1);
                if constexpr (P::kHasFactors) factor = splat(of_x[matrix.num_groups]), all_of_x = all_of_x * factor;
                UNROLL for (int v = 0; v < NV; v++) {
                    float* total = totals + (m * NV + v) * kLanes;
                    Vec value = P::value(sum[m][v], sum_of_x);
                    if constexpr (P::kHasFactors) value = value * factor;
                    Vec y = fma(scales[v], value, is_first ? splat(0) : load(total));
                    if (has_offsets) y = fma(offsets[v], all_of_x, y);
                    store(total, y);
                }
            }
        };
        constexpr std::true_type yes;
        constexpr std::false_type no;
        if (matrix.offsets) group == 0 ? add_group(yes, yes) : add_group(no, yes);
        else group == 0 ? add_group(yes, no) : add_group(no, no);
    }
}

// Writes units of a panel one by one, as `C::Wide` has them, or as ByteCodes8 if these are bytes.
template <class C>
static void expand(const uint8_t* panel, int64_t first, int64_t last, uint8_t* to) {
    const typename C::Loader codes;
    for (int64_t unit = first; unit < last; unit += C::kUnits) {
        const uint8_t* at = panel + unit / C::kUnits * 2 * C::kBytes;
        for (int line = 0; line < 2 * C::kBytes; line += 64) {
#ifdef QUIPU_AMX  // products of tiles take so little time that widening mostly waits for memory
            prefetch(at + 2 * kCodesAhead + line);
#else
            prefetch_first(at + 2 * kCodesAhead + line);
#endif
        }
        auto raw = codes.load(at);
        for_each_unit<C::kUnits>([&](auto i) __attribute__((always_inline)) {
            typename C::Product::Right l, h;
            codes.template get<i.value>(raw, l, h);
            memcpy(to, &l, sizeof l);
            memcpy(to + sizeof l, &h, sizeof h);
            to += 2 * sizeof l;
        });
    }
}
