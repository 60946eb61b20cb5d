// y = x @ weight.T (+ bias) (+ z), and the packing of weights. Neighbouring operations of a model may be fused: x may be
// normed first (Op::norm), and if y is gate and up, only their activation may be stored (Op::activation).
#include "../rows/activate.h"
#include "../vec/buffer.h"
#include "../vec/micro.h"
#include "../rows/norm.h"
#include "../program.h"

namespace {

constexpr int64_t kRowsPerChunk = 128;  // their part of x stays in the second-level cache
constexpr int64_t kFewRows = 8;       // up to this many, each thread norms all rows, which is faster than a barrier
constexpr int64_t kGroup = 3;         // panels per piece of work: 6 Vecs of columns, divisible by 2 and 3

PackedF32 right_hand(const Op& op, int64_t panel, const float*) {
    return {static_cast<const float*>(op.weight) + panel * kPanel * op.width, kPanel * op.width};
}
PackedBf16 right_hand(const Op& op, int64_t panel, const bf16*) {
    int64_t stride = kPanel * (op.width + op.width % 2);
    return {static_cast<const bf16*>(op.weight) + panel * stride, stride};
}

Target target(const Op& op, int64_t row, int64_t panel) {
    int64_t n = panel * kPanel;
    return {op.y + row * op.y_stride + n,
            op.y_stride,
            true,
            op.bias ? op.bias + n : nullptr,
            op.z ? op.z + row * op.z_stride + n : nullptr,
            op.z_stride,
            op.out_width - n};
}

// Columns are assigned in groups, and at the end panel by panel, so that threads finish together.
struct Pieces {
    int64_t num_panels, groups, chunks;
    Pieces(int64_t num_columns, int64_t num_rows, int num_threads) {
        num_panels = (num_columns + kPanel - 1) / kPanel;
        chunks = (num_rows + kRowsPerChunk - 1) / kRowsPerChunk;
        int64_t singles = chunks == 1 ? kGroup * num_threads : 0;
        groups = std::max<int64_t>(0, num_columns / kPanel - singles) / kGroup;
    }
    int64_t count() const { return (groups + num_panels - kGroup * groups) * chunks; }
    // consecutive pieces share their weights
    int64_t chunk(int64_t piece) const { return piece % chunks; }
    int64_t panel(int64_t piece) const {
        int64_t i = piece / chunks;
        return i < groups ? i * kGroup : i + (kGroup - 1) * groups;
    }
    int64_t panels(int64_t piece) const { return piece / chunks < groups ? kGroup : 1; }
};

// Vecs of columns at a time for this many rows: about twelve sums keep the execution units busy.
template <int MR>
constexpr int kVecsAtOnce = MR <= 2 ? 6 : MR <= 4 ? 3 : 2;

// MR rows by a group of panels or by a single panel.
template <int MR, class B>
void multiply_part(PlainRows a, B b, int64_t num_k, int64_t panels, const Target& t, LinePrefetch& ahead) {
    constexpr int wide = kVecsAtOnce<MR>;
    if (panels < kGroup) {
        if (t.num_columns >= kPanel) multiply_in_registers<MR, 2, true>(a, b, num_k, t, ahead);
        else multiply_in_registers<MR, 2, false>(a, b, num_k, t, ahead);
        return;
    }
    for (int64_t v = 0; v < 2 * kGroup; v += wide) {
        if constexpr (wide % 2 == 1)
            if (v % 2 == 1) {
                multiply_in_registers<MR, wide, true>(a, b.columns(v).second_half(), num_k, t.columns(v), ahead);
                continue;
            }
        multiply_in_registers<MR, wide, true>(a, b.columns(v), num_k, t.columns(v), ahead);
    }
}
int64_t num_calls(int64_t rows, int64_t panels) { return panels < kGroup ? 1 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3; }

template <class T>
void multiply_piece(const Op& op, int64_t row, int64_t rows, int64_t panel, int64_t panels, const Target& target, LinePrefetch ahead) {
    auto right = right_hand(op, panel, (T*)nullptr);
    int64_t calls = 0;
    for (int64_t part = 0; part < num_parts(rows); part++) calls += num_calls(split(rows, part + 1) - split(rows, part), panels);
    int64_t strides = calls * ((op.width + kStride - 1) / kStride);
    ahead.lines = ((ahead.end - ahead.p + 63) / 64 + strides - 1) / strides;
    for (int64_t part = 0; part < num_parts(rows); part++) {
        int64_t m = row + split(rows, part), count = row + split(rows, part + 1) - m;
        PlainRows a{op.x + m * op.x_stride, op.x_stride};
        Target t = target.rows(m - row);
        with_rows(count, [&](auto size) { multiply_part<size.value>(a, right, op.width, panels, t, ahead); });
    }
}

template <class T>
LinePrefetch panels_ahead(const Op& op, int64_t first, int64_t panels) {
    return {reinterpret_cast<const char*>(right_hand(op, first, (T*)nullptr).p),
            reinterpret_cast<const char*>(right_hand(op, first + panels, (T*)nullptr).p), 0};
}

// Stores sums that an adapter may have changed, which are not in y.
void store_sums(const Op& op, int64_t row, int64_t rows, int64_t panel, int64_t panels, const Target& sums) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < panels * kPanel; i += kLanes) {
            int64_t n = panel * kPanel + i;
            Mask mask = first_lanes(op.out_width - n);
            Vec y = load(sums.c + m * sums.stride + i, mask);
            if (op.z) y = load(op.z + (row + m) * op.z_stride + n, mask) + y;
            store(op.y + (row + m) * op.y_stride + n, mask, y);
        }
}

// A group of panels is prefetched while the one before it is multiplied, and stays in the second-level cache for all rows of
// a chunk. So each thread takes a piece ahead; the first piece of each is fixed. With an activation, a piece is some columns
// of gate and the same columns of up.
template <class T>
void linear_of(const Op& op, const Pass& pass, const Worker& worker) {
    static thread_local Buffer<float> both;
    int64_t num_rows = ::num_rows(op, pass);
    int64_t columns = op.activation ? op.out_width / 2 : op.out_width, half = columns / kPanel;
    constexpr int64_t wide = kGroup * kPanel;
    if (op.activation || op.v) both.resize(std::max<size_t>(both.size(), std::min(num_rows, kRowsPerChunk) * 2 * wide));
    Pieces pieces(columns, num_rows, worker.num_threads);
    for (int64_t piece = worker.thread, next; piece < pieces.count(); piece = next) {
        next = worker.num_threads + worker.next();
        int64_t chunk = pieces.chunk(piece), panel = pieces.panel(piece), panels = pieces.panels(piece);
        int64_t row = num_rows * chunk / pieces.chunks, rows = num_rows * (chunk + 1) / pieces.chunks - row;
        bool other = next < pieces.count() && pieces.panel(next) != panel;
        LinePrefetch ahead = other ? panels_ahead<T>(op, pieces.panel(next), pieces.panels(next)) : LinePrefetch{};
        if (!is_needed(op, pass, row, row + rows, (panel + panels) * kPanel)) continue;
        if (!op.activation && !op.v) {
            multiply_piece<T>(op, row, rows, panel, panels, target(op, row, panel), ahead);
            continue;
        }
        const float* bias = op.bias ? op.bias + panel * kPanel : nullptr;
        Target gate{both.data(), 2 * wide, true, bias, nullptr, 0, columns - panel * kPanel};
        Target up{both.data() + wide, 2 * wide, true, bias ? bias + columns : nullptr, nullptr, 0, wide};
        multiply_piece<T>(op, row, rows, panel, panels, gate, ahead);
        if (op.v) add_low_rank(op, row, rows, panel, panels, {gate.c, gate.stride, kPanel});
        if (!op.activation) {
            store_sums(op, row, rows, panel, panels, gate);
            continue;
        }
        if (other) ahead = panels_ahead<T>(op, half + pieces.panel(next), pieces.panels(next));
        multiply_piece<T>(op, row, rows, half + panel, panels, up, ahead);
        if (op.v) add_low_rank(op, row, rows, half + panel, panels, {up.c, up.stride, kPanel});
        for (int64_t m = 0; m < rows; m++)
            for (int64_t i = 0; i < panels * kPanel; i += kLanes) {
                Vec g = load(gate.c + m * 2 * wide + i), u = load(up.c + m * 2 * wide + i);
                store(op.y + (row + m) * op.y_stride + panel * kPanel + i, op.activation == kGeluMul ? gelu_mul(g, u) : silu_mul(g, u));
            }
    }
}

// Norms rows of x into the memory that replaces op.x.
void norm_rows(Op& op, int64_t num_rows, const Worker& worker) {
    static thread_local Buffer<float> kept;
    bool few = num_rows <= kFewRows;
    if (few) kept.resize(std::max<size_t>(kept.size(), num_rows * op.width));
    float* to = few ? kept.data() : op.scratch;
    Share s(num_rows, worker);
    if (few) s.begin = 0, s.end = num_rows;
    for (; s.begin < s.end; s.begin++) norm(op.x + s.begin * op.x_stride, op.norm, to + s.begin * op.width, op.width, op.eps);
    if (!few) worker.wait();
    op.x = to;
    op.x_stride = op.width;
}

}  // namespace

// See linear_bf16.cpp; null if the instruction set does not support it.
__attribute__((weak)) void linear_bf16(const Op&, const Pass&, const Worker&);

extern "C" int32_t quipu_multiplies_pairs() { return linear_bf16 != nullptr; }

void linear(const Op& original, const Pass& pass, const Worker& worker) {
    Op op = original;
    op.pass = &pass;
    bool pairs = linear_bf16 && op.stored == kBfloat16;
    if (op.norm && !pairs) norm_rows(op, num_rows(op, pass), worker);
    bool later = op.activation && op.out_width / 2 % kPanel;  // no piece has whole panels of both gate and up
    if (later) op.activation = 0, op.y = op.raw, op.y_stride = op.out_width;
    if (op.stored == kQuantized) linear_quantized(op, pass, worker);
    else if (pairs) linear_bf16(op, pass, worker);
    else if (op.stored == kBfloat16) linear_of<bf16>(op, pass, worker);
    else linear_of<float>(op, pass, worker);
    if (!later) return;
    worker.wait();
    op.x = op.raw, op.x_stride = op.out_width, op.width = op.out_width / 2, op.y = original.y, op.y_stride = original.y_stride;
    if (original.activation == kGeluMul) gelu_mul(op, pass, worker);
    else silu_mul(op, pass, worker);
}

// Reads rows of a packed matrix: an embedding that is also the head is not kept twice.
void embed(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t n = num_rows(op, pass);
    for (int64_t i = n * worker.thread / worker.num_threads; i < n * (worker.thread + 1) / worker.num_threads; i++) {
        int64_t id = pass.token_ids[i];
        if (id >= op.out_width) id = 0;
        int64_t lane = id % kPanel;
        float* y = op.y + i * op.y_stride;
        if (op.stored == kQuantized) {
            embed_quantized(op, id, y);
        } else if (op.stored == kBfloat16) {
            const bf16* p = right_hand(op, id / kPanel, (bf16*)nullptr).p;
            for (int64_t k = 0; k < op.width; k++) y[k] = widen(p[k / 2 * 2 * kPanel + lane * 2 + k % 2]) * op.scale;
        } else {
            const float* p = right_hand(op, id / kPanel, (float*)nullptr).p;
            for (int64_t k = 0; k < op.width; k++) y[k] = p[k * kPanel + lane] * op.scale;
        }
    }
}

// Packs weight [rows, width], row-major, into `packed`, which has whole panels of an even width. Missing rows are 0.
extern "C" void quipu_pack(const void* weight, void* packed, int64_t rows, int64_t width, int32_t stored) {
    int64_t num_panels = (rows + kPanel - 1) / kPanel;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t lane = 0; lane < kPanel; lane++) {
            int64_t n = panel * kPanel + lane;
            if (stored == kBfloat16) {
                int64_t even = width + width % 2;
                bf16* to = static_cast<bf16*>(packed) + panel * kPanel * even;
                const bf16* from = static_cast<const bf16*>(weight) + n * width;
                for (int64_t k = 0; k < even; k++)
                    to[k / 2 * 2 * kPanel + lane * 2 + k % 2] = n < rows && k < width ? from[k] : 0;
            } else {
                float* to = static_cast<float*>(packed) + panel * kPanel * width;
                const float* from = static_cast<const float*>(weight) + n * width;
                for (int64_t k = 0; k < width; k++) to[k * kPanel + lane] = n < rows ? from[k] : 0;
            }
        }
}
