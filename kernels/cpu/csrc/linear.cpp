// y = x @ weight.T (+ bias) (+ z), and how weights are packed for it.
#include "micro.h"
#include "program.h"

namespace {

constexpr int64_t kRowsAtOnce = 128;  // their share of x stays in the second-level cache
constexpr int64_t kGroup = 3;         // panels of a piece of work: 6 Vecs of columns, which 2 and 3 divide

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

// Columns are dealt out by the group, and one panel at a time in the end, so that threads end together.
struct Pieces {
    int64_t num_panels, groups, chunks;
    Pieces(const Op& op, int64_t num_rows, int num_threads) {
        num_panels = (op.out_width + kPanel - 1) / kPanel;
        chunks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
        int64_t singles = chunks == 1 ? kGroup * num_threads : 0;
        groups = std::max<int64_t>(0, op.out_width / kPanel - singles) / kGroup;
    }
    int64_t count() const { return (groups + num_panels - kGroup * groups) * chunks; }
    // neighbours in time share their weights
    int64_t chunk(int64_t piece) const { return piece % chunks; }
    int64_t panel(int64_t piece) const {
        int64_t i = piece / chunks;
        return i < groups ? i * kGroup : i + (kGroup - 1) * groups;
    }
    int64_t panels(int64_t piece) const { return piece / chunks < groups ? kGroup : 1; }
};

// Vecs of columns that fill the registers beside so many rows: twelve sums, or nearly, keep the units busy.
template <int MR>
constexpr int kWide = MR <= 2 ? 6 : MR <= 4 ? 3 : 2;

// MR rows by a group of panels or by one.
template <int MR, class B>
void multiply_part(PlainRows a, B b, int64_t num_k, int64_t panels, const Target& t, Ahead& ahead) {
    constexpr int wide = kWide<MR>;
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
void multiply_piece(const Op& op, int64_t row, int64_t rows, int64_t panel, int64_t panels, Ahead ahead) {
    auto right = right_hand(op, panel, (T*)nullptr);
    int64_t calls = 0;
    for (int64_t part = 0; part < num_parts(rows); part++) calls += num_calls(split(rows, part + 1) - split(rows, part), panels);
    int64_t strides = calls * ((op.width + kStride - 1) / kStride);
    ahead.lines = ((ahead.end - ahead.p + 63) / 64 + strides - 1) / strides;
    for (int64_t part = 0; part < num_parts(rows); part++) {
        int64_t m = row + split(rows, part), count = row + split(rows, part + 1) - m;
        PlainRows a{op.x + m * op.x_stride, op.x_stride};
        Target t = target(op, m, panel);
        with_rows(count, [&](auto size) { multiply_part<size.value>(a, right, op.width, panels, t, ahead); });
    }
}

// A group of panels comes from memory while the one before it is multiplied, and stays in the second-level cache while
// all rows of a chunk meet it. So a piece is taken one ahead; the first of each thread is its own.
template <class T>
void linear_of(const Op& op, int64_t num_rows, const Worker& worker) {
    Pieces pieces(op, num_rows, worker.num_threads);
    for (int64_t piece = worker.thread, next; piece < pieces.count(); piece = next) {
        next = worker.num_threads + worker.next();
        int64_t chunk = pieces.chunk(piece), panel = pieces.panel(piece);
        int64_t row = num_rows * chunk / pieces.chunks, rows = num_rows * (chunk + 1) / pieces.chunks - row;
        Ahead ahead{};
        if (next < pieces.count() && pieces.panel(next) != panel) {
            int64_t first = pieces.panel(next), last = first + pieces.panels(next);
            ahead.p = reinterpret_cast<const char*>(right_hand(op, first, (T*)nullptr).p);
            ahead.end = reinterpret_cast<const char*>(right_hand(op, last, (T*)nullptr).p);
        }
        multiply_piece<T>(op, row, rows, panel, pieces.panels(piece), ahead);
    }
}

}  // namespace

// linear_bf16.cpp; null where the instruction set has nothing for it
__attribute__((weak)) void linear_bf16(const Op&, int64_t num_rows, const Worker&);

void linear(const Op& op, const Pass& pass, const Worker& worker) {
    if (linear_bf16 && op.stored == kBfloat16) return linear_bf16(op, num_rows(op, pass), worker);
    if (op.stored == kBfloat16) linear_of<bf16>(op, num_rows(op, pass), worker);
    else linear_of<float>(op, num_rows(op, pass), worker);
}

// Rows of a packed matrix: an embedding that is also the head need not be kept twice.
void embed(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t n = num_rows(op, pass);
    for (int64_t i = n * worker.thread / worker.num_threads; i < n * (worker.thread + 1) / worker.num_threads; i++) {
        int64_t id = pass.token_ids[i], lane = id % kPanel;
        float* y = op.y + i * op.y_stride;
        if (op.stored == kBfloat16) {
            const bf16* p = right_hand(op, id / kPanel, (bf16*)nullptr).p;
            for (int64_t k = 0; k < op.width; k++) y[k] = widen(p[k / 2 * 2 * kPanel + lane * 2 + k % 2]) * op.scale;
        } else {
            const float* p = right_hand(op, id / kPanel, (float*)nullptr).p;
            for (int64_t k = 0; k < op.width; k++) y[k] = p[k * kPanel + lane] * op.scale;
        }
    }
}

// weight [rows, width] row-major into `packed`, which has room for whole panels of an even width. Missing rows are 0.
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
