// What the products with quantized matrices share: preparing rows of x, dividing the work among threads, and storing results.
#pragma once
#include "../rows/activate.h"
#include "../vec/buffer.h"
#include "pieces.h"
#include "../program.h"
#include "quantized_product.h"

// Words of a row beyond its width that are 0, so that a tile may read past a group.
constexpr int64_t kZeroWords = 16;

// Prepares all rows of x for a product P by `prepare(row, words, sums)`, once. Every thread of the team calls this, and gets a
// shared copy or its own.
template <class P, class F>
static PreparedRows prepare_rows(const QuantizedMatrix& m, int64_t num_rows, const Worker& worker, F prepare) {
    static thread_local Buffer<uint32_t> kept;
    constexpr int64_t kInputs = P::kInputs, kNumbers = P::kHasFactors ? 3 : 1;
    int64_t words = m.padded_width() / kInputs + kZeroWords;
    // an odd number of cache lines, so that rows do not share a few sets of the caches
    int64_t stride = ((words + kNumbers * m.num_groups + kLanes - 1) / kLanes | 1) * kLanes;
    size_t size = num_rows * stride;
    auto fill = [&](uint32_t* to, int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            uint32_t* at = to + row * stride;
            std::fill(at + words - kZeroWords - 8 / kInputs, at + words, 0);  // before the last inputs are written
            prepare(row, at, reinterpret_cast<float*>(at + words));
        }
    };
    if (num_rows <= kOwnRows) {  // each thread prepares all of them, which is faster than a barrier
        kept.resize(std::max(kept.size(), size));
        fill(kept.data(), 0, num_rows);
        return {kept.data(), stride, words};
    }
    uint32_t* shared;
#pragma omp single copyprivate(shared)
    {
        kept.resize(std::max(kept.size(), size));
        shared = kept.data();
    }
    fill(shared, num_rows * worker.thread / worker.num_threads, num_rows * (worker.thread + 1) / worker.num_threads);
#pragma omp barrier
    return {shared, stride, words};
}

// Multiplies `rows` rows, at most kRowsAtOnce<NP>, with NP panels.
template <int NP>
constexpr int kRowsAtOnce = kLanes == 16 ? (NP == 4 ? 2 : NP == 2 ? 4 : 8) : (NP == 4 ? 1 : NP == 2 ? 2 : 4);

template <class C, int NP, bool kNext>
static void multiply_some(int64_t rows, const PreparedRows& x, const Columns& columns, int64_t first, int64_t last, const Sums& sums) {
    constexpr int most = kRowsAtOnce<NP>;
    switch (rows) {
        case 1: return multiply_rows<C, 1, NP, kNext>(x, columns, first, last, sums);
        case 2: if constexpr (most >= 2) return multiply_rows<C, 2, NP, kNext>(x, columns, first, last, sums); break;
        case 3: if constexpr (most >= 4) return multiply_rows<C, 3, NP, kNext>(x, columns, first, last, sums); break;
        case 4: if constexpr (most >= 4) return multiply_rows<C, 4, NP, kNext>(x, columns, first, last, sums); break;
        case 5: if constexpr (most >= 8) return multiply_rows<C, 5, NP, kNext>(x, columns, first, last, sums); break;
        case 6: if constexpr (most >= 8) return multiply_rows<C, 6, NP, kNext>(x, columns, first, last, sums); break;
        case 7: if constexpr (most >= 8) return multiply_rows<C, 7, NP, kNext>(x, columns, first, last, sums); break;
        case 8: if constexpr (most >= 8) return multiply_rows<C, 8, NP, kNext>(x, columns, first, last, sums); break;
    }
}

// Any number of rows, divided evenly.
template <class C, int NP>
static void multiply_all(int64_t rows, const PreparedRows& x, const Columns& columns, int64_t first, int64_t last, const Sums& sums) {
    int64_t parts = (rows + kRowsAtOnce<NP> - 1) / kRowsAtOnce<NP>;
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
        float* partial = sums.partial ? sums.partial + row * NP * kPanel : nullptr;
        PreparedRows some{x.p + row * x.stride, x.stride, x.sums_at};
        Sums to{sums.totals + row * NP * kPanel, partial};
        if (NP == 1 && columns.ahead) multiply_some<C, NP, NP == 1>(count, some, columns, first, last, to);
        else multiply_some<C, NP, false>(count, some, columns, first, last, to);
    }
}

// Adds what follows a sum, and stores it.
static void finish_panel(const Op& op, int64_t row, int64_t num_rows, int64_t panel, float* totals, int64_t stride) {
    if (op.v) add_low_rank(op, row, num_rows, panel, 1, {totals, stride, kPanel});
    int64_t n = panel * kPanel;
    for (int v = 0; v < 2; v++, n += kLanes) {
        if (n >= op.out_width) break;
        Mask mask = first_lanes(op.out_width - n);
        for (int64_t m = 0; m < num_rows; m++) {
            Vec y = load(totals + m * stride + v * kLanes);
            if (op.bias) y = y + load(op.bias + n, mask);
            if (op.z) y = load(op.z + (row + m) * op.z_stride + n, mask) + y;
            store(op.y + (row + m) * op.y_stride + n, mask, y);
        }
    }
}

constexpr int64_t kRowsPerChunk = 128, kMostPanels = 4;

// How a product is divided: with tiles, more rows that stay in cache while panels, whose codes are widened for them, change.
inline Division division(const QuantizedMatrix&, [[maybe_unused]] const PreparedRows& x) {
#ifdef QUIPU_AMX
    constexpr int64_t kStep = 32, kBytes = 800 << 10;
    return {std::clamp<int64_t>(kBytes / (4 * x.stride) / kStep, 4, 12) * kStep, kStep, kMostPanels, true};
#else
    return {kRowsPerChunk, 1, kMostPanels, false};
#endif
}

// Computes a piece without its first rows, if nothing reads them.
template <class F>
static void compute_needed(const Op& op, const Pass& pass, const Division& by, int64_t row, int64_t rows, int64_t panel, int64_t panels,
                           int64_t next, F go) {
    int64_t end = row + rows, step = by.keeps_rows ? by.step : rows, columns = (panel + panels) * kPanel;
    while (row < end && !is_needed(op, pass, row, std::min(row + step, end), columns)) row += step;
    if (row < end) go(op, row, end - row, panel, panels, next);
}

// Computes some panels of gate and the same panels of up at a time, and stores their activation.
template <class F>
static void for_each_activated_piece(const Op& op, const Pass& pass, const Division& by, const Worker& worker, F go) {
    static thread_local Buffer<float> kept;  // of each row, the columns of gate and then those of up
    int64_t num_panels = op.out_width / 2 / kPanel;
    for_each_piece(num_rows(op, pass), num_panels, by, worker, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
        int64_t columns = panels * kPanel;
        kept.resize(std::max<size_t>(kept.size(), rows * 2 * columns));
        Op stored = op;  // its y has the rows and columns of this piece alone
        stored.y_stride = 2 * columns;
        for (int64_t part = 0, first = panel; part < 2; part++, first += num_panels) {
            stored.y = kept.data() + part * columns - row * stored.y_stride - first * kPanel;
            go(stored, row, rows, first, panels, panel + (part == 0 ? num_panels : worker.num_threads * panels));
        }
        for (int64_t r = 0; r < rows; r++) {
            const float* gate = kept.data() + r * 2 * columns;
            float* y = op.y + (row + r) * op.y_stride + panel * kPanel;
            for (int64_t i = 0; i < columns; i += kLanes) {
                Vec g = load(gate + i), u = load(gate + columns + i);
                store(y + i, op.activation == kGeluMul ? gelu_mul(g, u) : silu_mul(g, u));
            }
        }
    });
}

// Divides a product among threads. `go(op, row, rows, panel, panels, next)` computes a piece and stores it in y of its `op`; `next`
// is the panel that this thread multiplies after it, if the threads take their pieces in turn.
template <class F>
static void for_each_needed_piece(const Op& op, const Pass& pass, const Division& by, const Worker& worker, F go) {
    if (op.activation) return for_each_activated_piece(op, pass, by, worker, go);
    int64_t num_panels = divide_up(op.out_width, kPanel);
#ifdef QUIPU_PAIRS
    if (op.joined && heads_are_taken(op, *op.joined, pass)) {
        static thread_local Buffer<float> kept;
        const Op& attend = *op.joined;
        int64_t width = attend.width, of_head = width / kPanel;
        Division by_heads{by.rows, by.step, 1, by.keeps_rows};
        for_each_piece(num_rows(op, pass), num_panels / of_head, by_heads, worker, [&](int64_t row, int64_t rows, int64_t head, int64_t) {
            kept.resize(std::max<size_t>(kept.size(), rows * width));
            int64_t panel = head * of_head, end = panel + of_head, next = panel + worker.num_threads * of_head;
            compute_needed(op, pass, by, row, rows, panel, of_head, next, [&](const Op&, int64_t first, int64_t count, auto...) {
                Op stored = op;  // its y has the rows and columns of this piece alone
                stored.y = kept.data() - first * width - head * width;
                stored.y_stride = width;
                for (int64_t i = panel, after; i < end; i = after) {
                    after = std::min(i + by.panels, end);
                    go(stored, first, count, i, after - i, after < end ? after : next);
                }
                take_head(attend, pass, first, count, head, kept.data());
            });
        });
        return;
    }
#endif
    for_each_piece(num_rows(op, pass), num_panels, by, worker, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
        compute_needed(op, pass, by, row, rows, panel, panels, panel + worker.num_threads * panels, go);
    });
}

constexpr int64_t kFewRows = 8, kPanelRows = 64;
// Not with AVX-512 alone, where products of several rows take so long that codes are best prefetched into the first-level cache.
constexpr bool kPrefetchesNext = kPairCodes || kLanes == 8;

// At most kFewRows rows by several panels, from the codes themselves. `next`: the panel that the thread multiplies then. `ahead`:
// what is prefetched meanwhile, a part of so many of as many bytes as a panel has; null: the codes that are read next.
template <class C>
static void multiply_few(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel,
                         int64_t panels, int64_t next, const uint8_t* ahead = nullptr, int64_t parts = 1) {
    alignas(64) float totals[kFewRows * kMostPanels * kPanel];
    int64_t units = m.padded_width() / C::Product::kInputs;
    PreparedRows some{x.p + row * x.stride, x.stride, x.sums_at};
    for (int64_t done = 0, count; done < panels; done += count) {
        count = panels - done >= 4 ? 4 : panels - done >= 2 ? 2 : 1;
        if (rows > kRowsAtOnce<4>) count = std::min<int64_t>(count, rows > kRowsAtOnce<2> ? 1 : 2);
        const uint8_t* codes = m.codes + (panel + done) * m.panel_bytes();
        int64_t until_next = done + count < panels ? count : next - panel - done;
        Columns columns{&m, panel + done, codes, m.panel_bytes(), ahead, 2 * C::kBytes / parts, until_next};
        Sums sums{totals, nullptr};
        if (count == 4) multiply_all<C, 4>(rows, some, columns, 0, units, sums);
        else if (count == 2) multiply_all<C, 2>(rows, some, columns, 0, units, sums);
        else multiply_all<C, 1>(rows, some, columns, 0, units, sums);
        for (int64_t i = 0; i < count; i++) finish_panel(op, row, rows, panel + done + i, totals + i * kPanel, count * kPanel);
    }
}

// Any number of rows by several panels, from the codes themselves. Of up to kPanelRows rows, all are multiplied by one panel, whose
// codes stay in the caches, before the next, which is prefetched meanwhile; of more, a few by all panels, so that they stay in the
// first-level cache.
template <class C>
static void multiply_codes(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel,
                           int64_t panels, int64_t next) {
    if (rows <= kFewRows) return multiply_few<C>(op, m, x, row, rows, panel, panels, next);
    int64_t parts = (rows + kFewRows - 1) / kFewRows, step = rows <= kPanelRows ? 1 : panels, later = parts - 1;
    for (int64_t i = panel, end = panel + panels; i < end; i += step) {
        int64_t after = i + step < end ? i + step : next;
        for (int64_t part = 0; part < parts; part++) {
            int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
            const uint8_t* ahead = nullptr;
            if (kPrefetchesNext && step == 1 && part > 0) ahead = m.codes + after * m.panel_bytes() + (part - 1) * (m.panel_bytes() / later);
            multiply_few<C>(op, m, x, row + first, count, i, step, part < later ? i : after, ahead, ahead ? later : 1);
        }
    }
}
