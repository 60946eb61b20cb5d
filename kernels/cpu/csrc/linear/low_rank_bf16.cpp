// The two products of adapters in bfloat16, by pairs (vec/pairs.h). low_rank.cpp calls them.
//
// x @ a.T is stored rounded, in rows of twice Op::y_stride elements. The columns of each part begin at a multiple of kPairStep, and
// are padded with 0 to one, so that they are multiplied by tiles that reach beyond the part's rows of b.
#include "low_rank.h"

#ifdef QUIPU_PAIRS
#include "../vec/pairs.h"
#include "low_rank_bf16.h"
#include "rounded_rows.h"

namespace {

// Some panels of x @ a.T of some rows.
void shrink_rows(const Op& op, const LowRank& low, const int64_t* rows, int64_t count, int64_t panel, int64_t panels, bf16* y) {
    static thread_local Buffer<bf16> kept;
    alignas(64) float sums[Pairs::kRowsAtOnce * kPanel];
    bool together = op.x_rounded && rows[count - 1] - rows[0] == count - 1;
    int64_t x_stride = row_stride(op), num_k = op.width + op.width % 2, vec = num_k * kLanes;
    const bf16* x = reinterpret_cast<const bf16*>(op.x) + rows[0] * x_stride;
    if (!together) {
        kept.resize(std::max<size_t>(kept.size(), Pairs::kRowsAtOnce * (padded_depth(op.width) + kPairStep)));
        x_stride = (padded_depth(op.width) / kPairStep | 1) * kPairStep;
        for (int64_t m = 0; m < count; m++) round_row_of(op, rows[m], kept.data() + m * x_stride);
        x = kept.data();
    }
    Pairs pairs;
    int64_t columns = 0;
    for (const LowRankPart* part = low.parts; part < low.parts + low.num_parts; part++) columns = std::max(columns, part->first + part->rank);
    for (int64_t end = panel + panels; panel < end; panel++) {
        const bf16* a = static_cast<const bf16*>(low.a) + 2 * panel * vec;
        // sums of columns that no part has are not used: rather than more memory, the first half of the panel is read twice
        const bf16* second = columns > panel * kPanel + kLanes ? a + vec : a;
        pairs.add(x, x_stride, count, Halves<2 * kLanes>{a, second}, num_k, true, sums, kPanel);
        for (const LowRankPart* part = low.parts; part < low.parts + low.num_parts; part++) {
            int64_t first = std::max(part->first, panel * kPanel), last = std::min(part->first + part->rank, (panel + 1) * kPanel);
            bool ends = last == part->first + part->rank;
            for (int64_t m = 0; m < count && first < last; m++) {
                bf16 rounded[kPanel], *of_part = y + m * 2 * op.y_stride + part->place;
                round_row(sums + m * kPanel, kPanel, rounded);
                std::copy_n(rounded + first - panel * kPanel, last - first, of_part + first - part->first);
                if (ends) std::fill(of_part + part->rank, of_part + padded_depth(part->rank), 0);
            }
        }
    }
}

}  // namespace

void low_rank_bf16(const Op& op, const Pass& pass, const Worker& worker) {
    constexpr int64_t kChunk = 32;  // rows
    Adapted adapted(op, pass);
    int64_t chunks = 0;
    for (int64_t adapter = 0; adapter < pass.num_adapters; adapter++)
        if (adapter_of(op, adapter)) chunks += (adapted.count(adapter) + kChunk - 1) / kChunk;
    bool divided = chunks < worker.num_threads;  // then threads share the rows of a chunk
    int64_t item = worker.next(), before = 0;
    for (int64_t adapter = 0; adapter < pass.num_adapters; adapter++) {
        const LowRank* low = adapter_of(op, adapter);
        int64_t rows = adapted.count(adapter);
        if (!low || rows == 0) continue;
        int64_t panels = low->num_vecs / 2, pieces = divided ? panels : 1, num_items = (rows + kChunk - 1) / kChunk * pieces;
        for (; item < before + num_items; item = worker.next()) {
            int64_t row = (item - before) / pieces * kChunk, first = adapted.starts[adapter] + row;
            bf16* y = reinterpret_cast<bf16*>(op.y) + (first - adapted.starts[0]) * 2 * op.y_stride;
            int64_t count = std::min(kChunk, rows - row), panel = (item - before) % pieces;
            shrink_rows(op, *low, adapted.rows + first, count, panel, divided ? 1 : panels, y);
        }
        before += num_items;
    }
}

// Adds to the sums of some rows, the first of which are of row `row`. `before`: how many rows of x @ a.T are before theirs.
void add_low_rank_bf16(const Op& op, const LowRank& low, const int64_t* rows, int64_t count, int64_t row, int64_t panel,
                       int64_t panels, int64_t before, SumsAt sums) {
    int64_t x_stride = 2 * op.narrow_stride;
    const bf16* x = reinterpret_cast<const bf16*>(op.v) + before * x_stride;
    Pairs pairs;
    for (int64_t done = 0, some; done < count; done += some, rows += some, x += some * x_stride) {
        some = std::min(Pairs::kRowsAtOnce, count - done);
        float* at = sums.p + (rows[0] - row) * sums.row_stride;
        bool together = rows[some - 1] - rows[0] == some - 1;
        alignas(64) float kept[Pairs::kRowsAtOnce * kPanel];
        for (const LowRankPart* part = low.parts; part < low.parts + low.num_parts; part++) {
            int64_t first = std::max(panel, part->first_panel), last = std::min(panel + panels, part->first_panel + part->num_panels);
            int64_t rank = part->rank + part->rank % 2;
            for (int64_t p = first; p < last; p++) {
                const bf16* b = static_cast<const bf16*>(part->b) + (p - part->first_panel) * rank * kPanel;
                float* to = at + (p - panel) * sums.panel_stride;
                Pairs::Further further{x + part->place, x_stride, b, rank};
                if (together) {
                    pairs.add_further(further, some, to, sums.row_stride);
                    continue;
                }
                auto each_row = [&](auto go) {
                    for (int64_t m = 0; m < some; m++) go(to + (rows[m] - rows[0]) * sums.row_stride, kept + m * kPanel);
                };
                each_row([](float* of_row, float* copy) { memcpy(copy, of_row, kPanel * sizeof(float)); });
                pairs.add_further(further, some, kept, kPanel);
                each_row([](float* of_row, float* copy) { memcpy(of_row, copy, kPanel * sizeof(float)); });
            }
        }
    }
}
#endif
