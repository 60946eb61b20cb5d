// y = x @ weight.T (+ bias) (+ z), and how weights are packed for it.
#include <cstdlib>

#include "micro.h"
#include "program.h"

namespace {

constexpr int64_t kRowsAtOnce = 96;   // with kDepth: their share of x stays in the second-level cache
constexpr int64_t kDepth = 512;       // a panel of that depth, and six rows, stay in the first-level cache
constexpr int64_t kFewRows = 64;      // up to here the way of the weights from memory takes a good part of the time
constexpr int64_t kStep = 128;        // with few rows: so little is asked for at once that memory keeps up
constexpr int64_t kGroup = 4;         // panels of a piece of work

// Six rows or fewer, evenly: 8 are 4 and 4, not 6 and 2.
int64_t split(int64_t num_rows, int64_t index) {
    int64_t parts = (num_rows + kMaxRows - 1) / kMaxRows;
    return num_rows * index / parts;
}
int64_t num_parts(int64_t num_rows) { return (num_rows + kMaxRows - 1) / kMaxRows; }

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

// Few rows: they lie in the first-level cache, and each weight is widened for all of them on its one way through.
template <class T>
void stream(const Op& op, int64_t num_rows, const Worker& worker) {
    int64_t num_panels = (op.out_width + kPanel - 1) / kPanel;
    for (int64_t first; (first = worker.next() * kGroup) < num_panels;) {
        int64_t count = std::min(kGroup, num_panels - first);
        if (num_rows < 3) {
            multiply(num_rows, PlainRows{op.x, op.x_stride}, right_hand(op, first, (T*)nullptr), op.width, count * 2,
                     target(op, 0, first));
            continue;
        }
        // a panel at a time, in cache for those who meet it after the first; the next one is on its way meanwhile
        for (int64_t panel = first; panel < first + count; panel++)
            for (int64_t k = 0; k < op.width; k += kStep) {
                int64_t depth = std::min(kStep, op.width - k);
                auto right = right_hand(op, panel, (T*)nullptr).from(k);
                auto next = right_hand(op, panel + 1, (T*)nullptr).from(k);
                int64_t lines = depth * kPanel * static_cast<int64_t>(sizeof(T)) / 64;
                for (int64_t part = 0; part < num_parts(num_rows); part++) {
                    int64_t m = split(num_rows, part), end = split(num_rows, part + 1);
                    if (panel + 1 < num_panels)
                        for (int64_t i = lines * part / num_parts(num_rows); i < lines * (part + 1) / num_parts(num_rows); i++)
                            _mm_prefetch(reinterpret_cast<const char*>(next.p) + i * 64, _MM_HINT_T1);
                    Target t = target(op, m, panel);
                    t.fresh = k == 0;
                    if (k + depth < op.width) t.bias = t.added = nullptr;
                    PlainRows a{op.x + m * op.x_stride + k, op.x_stride};
                    multiply(end - m, a, right, depth, 2, t);
                }
            }
    }
}

// Many rows: a piece of a panel stays in the first-level cache while all rows of a chunk meet it.
template <class T>
void blocked(const Op& op, int64_t num_rows, const Worker& worker) {
    int64_t num_panels = (op.out_width + kPanel - 1) / kPanel;
    int64_t groups = (num_panels + kGroup - 1) / kGroup;
    int64_t chunks = (num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int64_t item; (item = worker.next()) < groups * chunks;) {
        // neighbours in time share their weights
        int64_t chunk = item % chunks, first = item / chunks * kGroup, last = std::min(first + kGroup, num_panels);
        int64_t row = num_rows * chunk / chunks, rows = num_rows * (chunk + 1) / chunks - row;
        for (int64_t k = 0; k < op.width; k += kDepth) {
            int64_t depth = std::min(kDepth, op.width - k);
            for (int64_t panel = first; panel < last; panel++)
                for (int64_t part = 0; part < num_parts(rows); part++) {
                    int64_t m = row + split(rows, part), count = row + split(rows, part + 1) - m;
                    Target t = target(op, m, panel);
                    t.fresh = k == 0;
                    if (k + depth < op.width) t.bias = t.added = nullptr;
                    PlainRows a{op.x + m * op.x_stride + k, op.x_stride};
                    multiply(count, a, right_hand(op, panel, (T*)nullptr).from(k), depth, 2, t);
                }
        }
    }
}

template <class T>
void linear_of(const Op& op, int64_t num_rows, const Worker& worker) {
    if (num_rows <= kFewRows) stream<T>(op, num_rows, worker);
    else blocked<T>(op, num_rows, worker);
}

}  // namespace

#ifdef QUIPU_PAIRS
void linear_bf16(const Op&, int64_t num_rows, const Worker&);  // linear_bf16.cpp
#endif

void linear(const Op& op, const Pass& pass, const Worker& worker) {
#ifdef QUIPU_PAIRS
    if (op.stored == kBfloat16) return linear_bf16(op, num_rows(op, pass), worker);
#endif
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
