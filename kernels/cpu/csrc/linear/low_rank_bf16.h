// What an adapter adds to a product of pairs, as part of that product: while its sums are in tiles. Used by linear_bf16.cpp, for
// rows that lie together and have the same adapter; others are added to sums afterwards (add_low_rank).
#pragma once
#include <algorithm>

#include "../vec/pairs.h"
#include "low_rank.h"

class FurtherRows {
public:
    // Finds the adapter of these rows, if they have the same one.
    FurtherRows(const Op& op, int64_t row, int64_t rows) {
        Adapted adapted(op, *op.pass);
        for (int64_t adapter = 0; adapter < op.pass->num_adapters; adapter++) {
            const LowRank* low = adapter_of(op, adapter);
            if (!low || low->stored != kBfloat16 || adapted.count(adapter) < rows) continue;
            const int64_t* end = adapted.rows + adapted.starts[adapter + 1];
            const int64_t* at = std::lower_bound(adapted.rows + adapted.starts[adapter], end, row);
            if (end - at < rows || at[0] != row || at[rows - 1] != row + rows - 1) continue;
            low_ = low;
            x_stride_ = 2 * op.narrow_stride;
            x_ = reinterpret_cast<const bf16*>(op.v) + (at - adapted.rows - adapted.starts[0]) * x_stride_;
            return;
        }
    }
    bool any() const { return low_; }

    // Returns how many products are added to a panel: those of the parts that have some of its columns, of the three or fewer that
    // a model fuses.
    int64_t of_panel(int64_t panel, Pairs::Further (&further)[4]) const {
        int64_t count = 0;
        for (int64_t i = 0; i < low_->num_parts; i++) {
            const LowRankPart& part = low_->parts[i];
            if (panel < part.first_panel || panel >= part.first_panel + part.num_panels) continue;
            int64_t rank = part.rank + part.rank % 2;
            const bf16* b = static_cast<const bf16*>(part.b) + (panel - part.first_panel) * rank * kPanel;
            further[count++] = {x_ + part.place, x_stride_, b, rank};
        }
        return count;
    }

private:
    const LowRank* low_ = nullptr;
    const bf16* x_;
    int64_t x_stride_;
};
