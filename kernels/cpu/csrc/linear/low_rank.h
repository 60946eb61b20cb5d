// One adapter's part of a product: y += (x @ a.T) @ b.T. Filled by ../../adapted_products.py.
#pragma once
#include <cstdint>

struct LowRank {
    int64_t rank;    // a multiple of the panel
    const float* a;  // [rank, width], packed as all matrices are
    const float* b;  // [out_width, rank], packed
};
