// One adapter's part of a product: y += (x @ a.T) @ b.T. Filled by ../../adapted_products.py.
#pragma once
#include <cstdint>

#include "../program.h"

// Some adjacent columns of the product, which a model has fused of several modules: their rows of b, and the columns of
// x @ a.T that they are multiplied with.
struct LowRankPart {
    int64_t first_panel, num_panels;  // of the product; a panel at a border is in both parts, with 0 for the columns of the other
    int64_t first, rank;              // of x @ a.T
    int64_t place;                    // of these columns where x @ a.T is stored rounded: a multiple of kPairStep
    const void* b;                    // [panel][rank][kPanel], in bfloat16 [panel][rank / 2][kPanel][2]
};

struct LowRank {
    int64_t num_vecs;  // of the columns of x @ a.T
    int64_t num_parts;
    int64_t stored;    // dtype of a and b
    const void* a;     // [Vec][width][kLanes], in bfloat16 [Vec][width / 2][kLanes][2]
    const LowRankPart* parts;
};

// Rows of an operation by adapter.
struct Adapted {
    const int64_t *rows, *starts;
    Adapted(const Op& op, const Pass& pass)
        : rows(op.on_logits_rows ? pass.adapted_logits : pass.adapted_tokens),
          starts(op.on_logits_rows ? pass.adapted_logits_starts : pass.adapted_starts) {}
    int64_t count(int64_t adapter) const { return starts[adapter + 1] - starts[adapter]; }
};

inline const LowRank* adapter_of(const Op& op, int64_t adapter) { return static_cast<const LowRank*>(op.matrices[adapter]); }

// See low_rank_bf16.cpp; null if the instruction set does not support it.
__attribute__((weak)) void low_rank_bf16(const Op&, const Pass&, const Worker&);
__attribute__((weak)) void add_low_rank_bf16(const Op&, const LowRank&, const int64_t* rows, int64_t count, int64_t row, int64_t panel,
                                             int64_t panels, int64_t before, SumsAt sums);
