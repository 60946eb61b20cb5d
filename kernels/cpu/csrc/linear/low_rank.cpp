// Adapters: products of the rows that have one are changed by two narrow products, in float32.
//
//     low_rank      x @ a.T of the rows that have an adapter, sorted by adapter
//     add_low_rank  the product without adapters, plus that @ b.T
//
// What must always hold: a row's result depends on the row and its own adapter: each sum is one chain, as in all products.
#include <algorithm>

#include "../program.h"
#include "../vec/buffer.h"
#include "../vec/micro.h"
#include "low_rank.h"

namespace {

constexpr int64_t kPanelsAtOnce = 8;  // columns of add_low_rank that a thread takes

// Rows of an operation by adapter.
struct Adapted {
    const int64_t *rows, *starts;
    Adapted(const Op& op, const Pass& pass)
        : rows(op.on_logits_rows ? pass.adapted_logits : pass.adapted_tokens),
          starts(op.on_logits_rows ? pass.adapted_logits_starts : pass.adapted_starts) {}
};

// Scattered rows on the left-hand side
struct LeftRows {
    const float* p[kMaxRows];
    const float* at(int m, int64_t k) const { return p[m] + k; }
};

PackedF32 panel_of(const float* packed, int64_t panel, int64_t width) {
    return {packed + panel * kPanel * width, kPanel * width};
}

Target fresh(float* c, int64_t stride, int64_t num_columns) { return {c, stride, true, nullptr, nullptr, 0, num_columns}; }

// Calls go(adapter, first, count, column group) for each piece that this thread takes: up to kMaxRows rows of one adapter.
template <class G, class F>
void for_each_piece(const Adapted& adapted, const Pass& pass, const Worker& worker, G num_groups, F go) {
    int64_t item = worker.next(), before = 0;
    for (int64_t adapter = 0; adapter < pass.num_adapters; adapter++) {
        int64_t first = adapted.starts[adapter], count = adapted.starts[adapter + 1] - first, groups = num_groups(adapter);
        if (count == 0 || groups == 0) continue;
        int64_t chunks = num_parts(count);
        for (; item < before + chunks * groups; item = worker.next()) {
            int64_t chunk = (item - before) / groups, row = split(count, chunk);
            go(adapter, first + row, split(count, chunk + 1) - row, (item - before) % groups);
        }
        before += chunks * groups;
    }
}

}  // namespace

// y: rows in the order of Adapted, beginning with the first that has an adapter.
void low_rank(const Op& op, const Pass& pass, const Worker& worker) {
    Adapted adapted(op, pass);
    auto of = [&](int64_t adapter) { return static_cast<const LowRank*>(op.matrices[adapter]); };
    auto groups = [&](int64_t adapter) { return of(adapter) ? of(adapter)->rank / kPanel : 0; };
    for_each_piece(adapted, pass, worker, groups, [&](int64_t adapter, int64_t first, int64_t count, int64_t panel) {
        LeftRows x;
        for (int64_t m = 0; m < count; m++) x.p[m] = op.x + adapted.rows[first + m] * op.x_stride;
        float* y = op.y + (first - adapted.starts[0]) * op.y_stride + panel * kPanel;
        NoPrefetch none;
        multiply<2>(count, x, panel_of(of(adapter)->a, panel, op.width), op.width, 2, fresh(y, op.y_stride, kPanel), none);
    });
}

// x: the result of low_rank; z: the product without adapters, which y may replace.
void add_low_rank(const Op& op, const Pass& pass, const Worker& worker) {
    static thread_local Buffer<float> sums;
    constexpr int64_t wide = kPanelsAtOnce * kPanel;
    sums.resize(kMaxRows * wide);
    Adapted adapted(op, pass);
    auto of = [&](int64_t adapter) { return static_cast<const LowRank*>(op.matrices[adapter]); };
    auto copy = [&](int64_t row) { std::copy_n(op.z + row * op.z_stride, op.out_width, op.y + row * op.y_stride); };
    if (op.y != op.z)
        for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
            int64_t adapter = std::upper_bound(adapted.starts, adapted.starts + pass.num_adapters + 1, s.begin) - adapted.starts - 1;
            if (adapter < 0 || !of(adapter)) copy(adapted.rows[s.begin]);
        }
    int64_t all = (op.out_width + wide - 1) / wide;
    auto groups = [&](int64_t adapter) { return of(adapter) ? all : 0; };
    for_each_piece(adapted, pass, worker, groups, [&](int64_t adapter, int64_t first, int64_t count, int64_t group) {
        int64_t rank = of(adapter)->rank, column = group * wide, columns = std::min(wide, op.out_width - column);
        PlainRows x{op.x + (first - adapted.starts[0]) * op.x_stride, op.x_stride};
        NoPrefetch none;
        int64_t panels = (columns + kPanel - 1) / kPanel;
        multiply<6>(count, x, panel_of(of(adapter)->b, column / kPanel, rank), rank, 2 * panels, fresh(sums.data(), wide, wide), none);
        for (int64_t m = 0; m < count; m++) {
            const float* z = op.z + adapted.rows[first + m] * op.z_stride + column;
            float* y = op.y + adapted.rows[first + m] * op.y_stride + column;
            for (int64_t i = 0; i < columns; i++) y[i] = z[i] + sums[m * wide + i];
        }
    });
}
