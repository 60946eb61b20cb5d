// y = x @ weight.T (+ bias) (+ z) for bfloat16 weights, on processors with bfloat16 products (AVX-512 BF16, AMX): x is
// normed first if the operation says so, and rounded to bfloat16; sums are float32, and may be activated. linear.cpp calls this
// for such matrices.
#include "../program.h"
#include "../vec/vec.h"

#ifdef QUIPU_PAIRS
#include <vector>

#include "../rows/activate.h"
#include "../vec/buffer.h"
#include "../vec/pairs.h"
#include "low_rank_bf16.h"
#include "pieces.h"
#include "rounded_rows.h"

namespace {

constexpr int64_t kStreamedBytes = 8 << 20;  // of a result that does not stay in the caches: it is stored past them

void round_rows(const Op& op, int64_t first, int64_t last, bf16* to) {
    for (int64_t row = first; row < last; row++) round_row_of(op, row, to + row * row_stride(op));
}

// Rounds all rows of x, unless they are. Every thread of the team calls this, and gets a shared copy or its own.
const bf16* rounded(const Op& op, int64_t num_rows, const Worker& worker) {
    if (op.x_rounded) return reinterpret_cast<const bf16*>(op.x);
    static thread_local Buffer<bf16> kept;
    size_t size = num_rows * row_stride(op);
    if (num_rows <= kOwnRows) {  // each thread rounds all of them, which is faster than a barrier
        kept.resize(std::max(kept.size(), size));
        round_rows(op, 0, num_rows, kept.data());
        return kept.data();
    }
    bf16* shared;
#pragma omp single copyprivate(shared)
    {
        kept.resize(std::max(kept.size(), size));
        shared = kept.data();
    }
    round_rows(op, num_rows * worker.thread / worker.num_threads, num_rows * (worker.thread + 1) / worker.num_threads, shared);
#pragma omp barrier
    return shared;
}

// Sums of some rows and panels: one panel after the other, so that the rows of a panel, which are multiplied one after the
// other, do not share a few sets of the caches.
struct PanelSums {
    float* p;
    int64_t rows;
    float* at(int64_t panel, int64_t row) const { return p + (panel * rows + row) * kPanel; }
};

bool is_streamed(const Op& op, int64_t num_rows) {
    bool whole_lines = op.out_width % kLanes == 0 && op.y_stride % kLanes == 0 && reinterpret_cast<uintptr_t>(op.y) % 64 == 0;
    return !op.activation && whole_lines && num_rows * op.out_width * static_cast<int64_t>(sizeof(float)) >= kStreamedBytes;
}

// Adds what follows the sums of some rows, from `m` of them on, and stores them: all panels of a row at a time, since rows of y
// are far apart.
template <bool kStreamed>
void finish(const Op& op, int64_t row, int64_t m, int64_t num_rows, int64_t first, int64_t panels, const PanelSums& sums) {
    for (int64_t last = m + num_rows; m < last; m++)
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t n = (first + panel) * kPanel, i = 0; i < kPanel && n < op.out_width; n += kLanes, i += kLanes) {
                Mask mask = first_lanes(op.out_width - n);
                Vec y = load(sums.at(panel, m) + i);
                if (op.bias) y = y + load(op.bias + n, mask);
                if (op.z) y = load(op.z + (row + m) * op.z_stride + n, mask) + y;
                float* to = op.y + (row + m) * op.y_stride + n;
                if (kStreamed) _mm512_stream_ps(to, y);
                else store(to, mask, y);
            }
}

// Stores the activation of some panels of gate and the same panels of up, which follow them in `sums`.
void finish_activated(const Op& op, int64_t row, int64_t m, int64_t num_rows, int64_t first, int64_t panels, const PanelSums& sums) {
    int64_t half = op.out_width / 2;
    for (int64_t last = m + num_rows; m < last; m++)
        for (int64_t panel = 0; panel < panels; panel++) {
            int64_t n = (first + panel) * kPanel, at = (row + m) * op.y_stride + n;
            auto activated = [&](int64_t i) {
                Vec gate = load(sums.at(panel, m) + i), up = load(sums.at(panels + panel, m) + i);
                if (op.bias) gate = gate + load(op.bias + n + i), up = up + load(op.bias + half + n + i);
                return op.activation == kGeluMul ? gelu_mul(gate, up) : silu_mul(gate, up);
            };
            if (op.y_rounded) round_two(activated(0), activated(kLanes), reinterpret_cast<bf16*>(op.y) + at);
            else
                for (int64_t i = 0; i < kPanel; i += kLanes) store(op.y + at + i, activated(i));
        }
}

// Gives the heads in some panels to attention.
void finish_heads(const Op& op, const Pass& pass, int64_t row, int64_t m, int64_t num_rows, int64_t first, int64_t panels, const PanelSums& sums) {
    static thread_local Buffer<float> kept;
    const Op& attend = *op.joined;
    int64_t width = attend.width, of_head = width / kPanel;
    kept.resize(std::max<size_t>(kept.size(), num_rows * width));
    for (int64_t panel = 0; panel < panels; panel += of_head) {
        float* to = kept.data();
        for (int64_t r = m; r < m + num_rows; r++)
            for (int64_t i = 0; i < width; i += kLanes, to += kLanes) {
                Vec y = load(sums.at(panel + i / kPanel, r) + i % kPanel);
                if (op.bias) y = y + load(op.bias + (first + panel) * kPanel + i);
                store(to, y);
            }
        take_head(attend, pass, row + m, num_rows, (first + panel) / of_head, kept.data());
    }
}

}  // namespace

void linear_bf16(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t num_rows = ::num_rows(op, pass);
    static thread_local Buffer<float> kept;
    const bf16* x = rounded(op, num_rows, worker);
    const bf16* weight = static_cast<const bf16*>(op.weight);
    int64_t x_stride = row_stride(op), num_k = op.width + op.width % 2;
    int64_t parts = op.activation ? 2 : 1, num_panels = divide_up(op.out_width / parts, kPanel);
    int64_t slice = Pairs::slice(num_rows, num_k);
    bool gives_heads = op.joined && heads_are_taken(op, *op.joined, pass);
    int64_t unit = gives_heads ? op.joined->width / kPanel : 1;  // panels that are not divided
    int64_t together = std::max<int64_t>(Pairs::panels_together(num_rows, num_k) / parts / unit, 1);
    Division by{Pairs::rows_together(slice), Pairs::kKeepsRows ? Pairs::kRowsAtOnce : 1, together, Pairs::kKeepsRows, Pairs::is_many(num_rows)};
    Pairs pairs;
    bool streamed = is_streamed(op, num_rows);
    for_each_piece(num_rows, num_panels / unit, by, worker, [&](int64_t row, int64_t rows, int64_t first_unit, int64_t units) {
        int64_t first = first_unit * unit, panels = units * unit;
        auto panel_of = [&](int64_t i) { return weight + (i / panels * num_panels + first + i % panels) * kPanel * num_k; };
        kept.resize(std::max<size_t>(kept.size(), parts * panels * rows * kPanel));
        PanelSums sums{kept.data(), rows};
        auto each_step = [&](auto go) {  // of rows that are multiplied at once
            for (int64_t m = 0, count; m < rows; m += count) {
                count = std::min(Pairs::kRowsAtOnce, rows - m);
                if (is_needed(op, pass, row + m, row + m + count, (first + panels) * kPanel)) go(m, count);
            }
        };
        static thread_local std::vector<FurtherRows> further_rows;  // of each step
        further_rows.clear();
        if (Pairs::kTakesFurther && op.v) each_step([&](int64_t m, int64_t count) { further_rows.emplace_back(op, row + m, count); });
        int64_t depth = Pairs::depth(rows);
        for (int64_t from = 0, end; from < num_k; from = end) {
            end = std::min(num_k, from + slice);
            for (int64_t i = 0; i < parts * panels; i++) {
                const bf16* panel = panel_of(i);
                const bf16* next = i + 1 < parts * panels ? panel_of(i + 1) + from * kPanel
                                   : end < num_k          ? panel_of(0) + end * kPanel
                                                          : panel_of(0) + worker.num_threads * panels * kPanel * num_k;
                Pairs::Ahead ahead(panel + from * kPanel, next, rows);
                for (int64_t k = from, step; k < end; k += depth) {
                    step = 0;
                    each_step([&](int64_t m, int64_t count) {
                        Pairs::Further further[4];
                        int64_t num_further = 0;
                        if (!further_rows.empty() && k + depth >= num_k && further_rows[step].any())
                            num_further = further_rows[step].of_panel(i / panels * num_panels + first + i % panels, further);
                        pairs.add(x + (row + m) * x_stride + k, x_stride, count, packed(panel + k * kPanel), std::min(depth, end - k), k == 0,
                                  sums.at(i, m), kPanel, ahead, further, num_further);
                        step++;
                    });
                }
            }
        }
        int64_t step = 0;
        each_step([&](int64_t m, int64_t count) {
            bool is_added = !further_rows.empty() && further_rows[step++].any();
            for (int64_t part = 0; op.v && !is_added && part < parts; part++)
                add_low_rank(op, row + m, count, part * num_panels + first, panels, {sums.at(part * panels, m), kPanel, rows * kPanel});
            if (gives_heads) finish_heads(op, pass, row, m, count, first, panels, sums);
            else if (op.activation) finish_activated(op, row, m, count, first, panels, sums);
            else if (streamed) finish<true>(op, row, m, count, first, panels, sums);
            else finish<false>(op, row, m, count, first, panels, sums);
        });
    });
    if (streamed) _mm_sfence();
}
#endif
