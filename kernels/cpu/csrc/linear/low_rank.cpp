// Adapters: products of the rows that have one are changed by two narrow products, summed in float32.
//
//     low_rank      x @ a.T of the rows that have an adapter, sorted by adapter; an operation before linear
//     add_low_rank  adds that @ b.T to the sums of linear, which calls it for each piece of its own
//
// Where the processor multiplies pairs, matrices in bfloat16 are multiplied with rows, and with x @ a.T, rounded to it
// (low_rank_bf16.cpp).
//
// What must always hold: a row's result depends on the row and its own adapter: each sum is one chain, as in all products.
// Rows without an adapter are neither read nor written.
#include <algorithm>

#include "../rows/norm.h"
#include "../vec/buffer.h"
#include "../vec/micro.h"
#include "low_rank.h"

namespace {

// Vecs of the narrow product at a time: with six rows, as many sums as there are registers for.
constexpr int64_t kVecs = kLanes == 16 ? 3 : 2;

// Scattered rows on the left-hand side
struct LeftRows {
    const float* p[kMaxRows];
    const float* at(int m, int64_t k) const { return p[m] + k; }
};

int64_t padded(int64_t k, const float*) { return k; }
int64_t padded(int64_t k, const bf16*) { return k + k % 2; }

// A loader of `multiply_in_registers`
template <class T>
struct PackedVecs;
template <>
struct PackedVecs<float> {
    const float* p;
    int64_t stride;
    static constexpr bool kPaired = false;
    Vec even(int64_t k, int v) const { return load(p + v * stride + k * kLanes); }
    Vec odd(int64_t k, int v) const { return even(k, v); }
};
template <>
struct PackedVecs<bf16> {
    const bf16* p;
    int64_t stride;
    static constexpr bool kPaired = true;
    Vec even(int64_t k, int v) const { return low_halves(p + v * stride + k * kLanes); }
    Vec odd(int64_t k, int v) const { return high_halves(p + v * stride + (k - 1) * kLanes); }
};

// Rounds as round_two of pairs.h does, which needs other instructions.
float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = bits + 0x7fff + ((bits >> 16) & 1);
    bits = (bits & 0x7f800000) == 0 ? 0 : x != x ? 0x7fc00000 : even & 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

// A row of x as it is multiplied: normed, and rounded where linear rounds it. May use the memory at `to`.
const float* prepared(const Op& op, int64_t row, float* to) {
    const float* x = op.x + row * op.x_stride;
    if (op.x_rounded) {
        const bf16* stored = reinterpret_cast<const bf16*>(op.x) + row * op.x_stride;
        for (int64_t k = 0; k < op.width; k++) to[k] = widen(stored[k]);
        return to;
    }
    if (op.norm) {
        norm(x, op.norm, to, op.width, op.eps);
        x = to;
    }
    if (op.stored != kBfloat16) return x;
    for (int64_t k = 0; k < op.width; k++) to[k] = rounded(x[k]);
    return to;
}

template <int NV, class T>
void multiply_vecs(int64_t count, const LeftRows& x, PackedVecs<T> a, int64_t width, float* y, int64_t stride) {
    NoPrefetch none;
    Target to{y, stride, true, nullptr, nullptr, 0, NV * kLanes};
    with_rows(count, [&](auto rows) { multiply_in_registers<rows.value, NV, true>(x, a, width, to, none); });
}

// Some Vecs of the product of up to kMaxRows rows with a.
template <class T>
void shrink(const Op& op, const LowRank& low, int64_t count, const LeftRows& x, int64_t v, int64_t vecs, float* y) {
    int64_t stride = kLanes * padded(op.width, (T*)nullptr);
    PackedVecs<T> a{static_cast<const T*>(low.a) + v * stride, stride};
    if (vecs == 1) multiply_vecs<1>(count, x, a, op.width, y, op.y_stride);
    else if (vecs == 2) multiply_vecs<2>(count, x, a, op.width, y, op.y_stride);
    else multiply_vecs<kVecs>(count, x, a, op.width, y, op.y_stride);
}

// Up to kMaxRows rows by one panel of b, added to what the rows of y hold.
template <int MR, class T>
void add_panel(const float* x, int64_t x_stride, const T* b, int64_t rank, float* const* y) {
    Vec sum[MR][2];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < 2; v++) sum[m][v] = load(y[m] + v * kLanes);
    auto step = [&](int64_t k, const Vec(&of)[2]) __attribute__((always_inline)) {
        UNROLL for (int m = 0; m < MR; m++) accumulate_row(sum[m], of, x + m * x_stride + k);
    };
    if constexpr (PackedVecs<T>::kPaired) {  // a pair of k takes two Vecs; an empty half of the last pair is 0, and not read
        for (int64_t k = 0; k < rank; k += 2) {
            const T *first = b + k * kPanel, *second = first + kPanel;
            Vec even[2] = {low_halves(first), low_halves(second)};
            step(k, even);
            if (k + 1 == rank) break;
            Vec odd[2] = {high_halves(first), high_halves(second)};
            step(k + 1, odd);
        }
    } else {
        for (int64_t k = 0; k < rank; k++) {
            Vec of[2] = {load(b + k * kPanel), load(b + k * kPanel + kLanes)};
            step(k, of);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < 2; v++) store(y[m] + v * kLanes, sum[m][v]);
}

// Some panels of one part, for up to kMaxRows rows, whose sums of the first panel are at `rows`.
template <class T>
void expand(const Op& op, const LowRankPart& part, int64_t count, const float* x, int64_t panel, int64_t panels, float* const* rows, int64_t panel_stride) {
    int64_t first = std::max(panel, part.first_panel), last = std::min(panel + panels, part.first_panel + part.num_panels);
    int64_t stride = padded(part.rank, (T*)nullptr) * kPanel;
    for (int64_t p = first; p < last; p++) {
        const T* b = static_cast<const T*>(part.b) + (p - part.first_panel) * stride;
        float* y[kMaxRows];
        for (int64_t m = 0; m < count; m++) y[m] = rows[m] + (p - panel) * panel_stride;
        with_rows(count, [&](auto size) { add_panel<size.value>(x + part.first, op.narrow_stride, b, part.rank, y); });
    }
}

}  // namespace

// y: rows in the order of Adapted, beginning with the first that has an adapter.
void low_rank(const Op& op, const Pass& pass, const Worker& worker) {
    static thread_local Buffer<float> kept;
    Adapted adapted(op, pass);
    int64_t chunks = 0;
    for (int64_t adapter = 0; adapter < pass.num_adapters; adapter++)
        if (const LowRank* low = adapter_of(op, adapter)) {
            if (low->stored == kBfloat16 && low_rank_bf16) return low_rank_bf16(op, pass, worker);  // all have one dtype
            chunks += num_parts(adapted.count(adapter));
        }
    if (chunks == 0) return;
    bool divided = chunks < worker.num_threads;  // then threads share the rows of a chunk
    kept.resize(std::max<size_t>(kept.size(), kMaxRows * op.width));
    int64_t item = worker.next(), before = 0;
    for (int64_t adapter = 0; adapter < pass.num_adapters; adapter++) {
        const LowRank* low = adapter_of(op, adapter);
        int64_t rows = adapted.count(adapter);
        if (!low || rows == 0) continue;
        int64_t groups = (low->num_vecs + kVecs - 1) / kVecs, pieces = divided ? groups : 1;
        for (; item < before + num_parts(rows) * pieces; item = worker.next()) {
            int64_t chunk = (item - before) / pieces, piece = (item - before) % pieces;
            int64_t first = adapted.starts[adapter] + split(rows, chunk), count = split(rows, chunk + 1) - split(rows, chunk);
            LeftRows x;
            for (int64_t m = 0; m < count; m++) x.p[m] = prepared(op, adapted.rows[first + m], kept.data() + m * op.width);
            for (int64_t group = divided ? piece : 0; group < (divided ? piece + 1 : groups); group++) {
                int64_t v = group * kVecs, vecs = std::min(kVecs, low->num_vecs - v);
                float* y = op.y + (first - adapted.starts[0]) * op.y_stride + v * kLanes;
                if (low->stored == kBfloat16) shrink<bf16>(op, *low, count, x, v, vecs, y);
                else shrink<float>(op, *low, count, x, v, vecs, y);
            }
        }
        before += num_parts(rows) * pieces;
    }
}

// Adds to sums of these rows and panels of linear, in whole panels.
void add_low_rank(const Op& op, int64_t row, int64_t rows, int64_t panel, int64_t panels, SumsAt sums) {
    Adapted adapted(op, *op.pass);
    for (int64_t adapter = 0; adapter < op.pass->num_adapters; adapter++) {
        const LowRank* low = adapter_of(op, adapter);
        if (!low || adapted.count(adapter) == 0) continue;
        const int64_t* end = adapted.rows + adapted.starts[adapter + 1];
        const int64_t* at = std::lower_bound(adapted.rows + adapted.starts[adapter], end, row);
        end = std::lower_bound(at, end, row + rows);
        int64_t all = end - at, before = at - adapted.rows - adapted.starts[0];
        if (all == 0) continue;
        if (low->stored == kBfloat16 && low_rank_bf16) {
            add_low_rank_bf16(op, *low, at, all, row, panel, panels, before, sums);
            continue;
        }
        for (int64_t chunk = 0; chunk < num_parts(all); chunk++) {
            int64_t first = split(all, chunk), count = split(all, chunk + 1) - first;
            const float* x = op.v + (before + first) * op.narrow_stride;
            float* sums_of[kMaxRows];
            for (int64_t m = 0; m < count; m++) sums_of[m] = sums.p + (at[first + m] - row) * sums.row_stride;
            for (const LowRankPart* part = low->parts; part < low->parts + low->num_parts; part++) {
                if (low->stored == kBfloat16) expand<bf16>(op, *part, count, x, panel, panels, sums_of, sums.panel_stride);
                else expand<float>(op, *part, count, x, panel, panels, sums_of, sums.panel_stride);
            }
        }
    }
}
