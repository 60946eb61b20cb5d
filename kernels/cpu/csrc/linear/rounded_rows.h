// Rows of x rounded to bfloat16, as products of pairs (vec/pairs.h) take them.
#pragma once
#include "../program.h"
#include "../rows/norm.h"
#include "../vec/buffer.h"
#include "../vec/pairs.h"

// How many elements apart rounded rows are: an odd number of lines, so that rows do not share a few sets of the caches.
inline int64_t row_stride(const Op& op) {
    return op.x_rounded ? op.x_stride : (padded_depth(op.width) / kPairStep | 1) * kPairStep;
}

// Norms a row of x first, if the operation says so. What is stored rounded is copied.
inline void round_row_of(const Op& op, int64_t row, bf16* to) {
    static thread_local Buffer<float> normed;
    if (op.x_rounded) {
        memcpy(to, reinterpret_cast<const bf16*>(op.x) + row * op.x_stride, op.width * sizeof(bf16));
    } else {
        const float* x = op.x + row * op.x_stride;
        if (op.norm) {
            normed.resize(std::max<size_t>(normed.size(), op.width));
            norm(x, op.norm, normed.data(), op.width, op.eps);
            x = normed.data();
        }
        int64_t whole = op.width / kPairStep * kPairStep;
        round_row(x, whole, to);
        for (int64_t k = whole; k < op.width; k++) narrow(x[k], to + k);
    }
    std::fill(to + op.width, to + padded_depth(op.width), 0);
}
