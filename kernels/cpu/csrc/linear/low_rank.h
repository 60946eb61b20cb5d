// One adapter's part of a product: y += (x @ a.T) @ b.T. Filled by ../../adapted_products.py.
#pragma once
#include <cstdint>

// Some adjacent columns of the product, which a model has fused of several modules: their rows of b, and the columns of
// x @ a.T that they are multiplied with.
struct LowRankPart {
    int64_t first_panel, num_panels;  // of the product; a panel at a border is in both parts, with 0 for the columns of the other
    int64_t first, rank;              // of x @ a.T
    const void* b;                    // [panel][rank][kPanel], in bfloat16 [panel][rank / 2][kPanel][2]
};

struct LowRank {
    int64_t num_vecs;  // of the columns of x @ a.T
    int64_t num_parts;
    int64_t stored;    // dtype of a and b
    const void* a;     // [Vec][width][kLanes], in bfloat16 [Vec][width / 2][kLanes][2]
    const LowRankPart* parts;
};
