// Element-wise operations other than SiLU: GELU, clamped SwiGLU, products, the gate of a shared expert, and the soft cap.
//
// What must always hold: a thread has the same rows in each of these and in those of rows.cpp, so that no barrier is
// needed between them.
#include "activate.h"
#include "each.h"
#include "norm.h"
#include "../program.h"
#include "../vec/tanh.h"

// y = gelu(first half of the row) * second half
void gelu_mul(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float *gate = op.x + s.begin * op.x_stride, *up = gate + op.width;
        float* y = op.y + s.begin * op.y_stride;
        each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, gelu_mul(load(gate + i, mask), load(up + i, mask))); });
    }
}

// y = gelu(what of the first half of the row exceeds its mean by so many standard deviations) * second half
void sparse_gelu_mul(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float *gate = op.x + s.begin * op.x_stride, *up = gate + op.width;
        float* y = op.y + s.begin * op.y_stride;
        float mean = mean_of(gate, op.width);
        Vec cutoff = splat(mean + std::sqrt(mean_square(gate, op.width, mean)) * op.scale);
        each(op.width, [&](int64_t i, Mask mask) {
            // NaN is preserved
            store(y + i, mask, gelu_mul(larger(splat(0), load(gate + i, mask) - cutoff), load(up + i, mask)));
        });
    }
}

// y = clamped_swiglu(first half of the row, second half)
void clamped_swiglu(const Op& op, const Pass& pass, const Worker& worker) {
    Vec alpha = splat(op.scale), limit = splat(op.soft_cap);
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float *gate = op.x + s.begin * op.x_stride, *up = gate + op.width;
        float* y = op.y + s.begin * op.y_stride;
        each(op.width, [&](int64_t i, Mask mask) {
            store(y + i, mask, clamped_swiglu(load(gate + i, mask), load(up + i, mask), alpha, limit));
        });
    }
}

void gelu(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* x = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, gelu_mul(load(x + i, mask), splat(1))); });
    }
}

// y = sigmoid(z) * x, with one z per row
void sigmoid_mul(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* x = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        Vec factor = splat(1) / (splat(1) + exp(splat(-op.z[s.begin * op.z_stride])));
        each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, load(x + i, mask) * factor); });
    }
}

// y = x * z, or x times one number, or one for each column
void mul(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* x = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        if (op.z) {
            const float* z = op.z + s.begin * op.z_stride;
            each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, load(x + i, mask) * load(z + i, mask)); });
        } else if (op.out_width == op.width) {
            const float* factors = static_cast<const float*>(op.weight);
            each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, load(x + i, mask) * load(factors + i, mask)); });
        } else {
            Vec factor = splat(*static_cast<const float*>(op.weight));
            each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, load(x + i, mask) * factor); });
        }
    }
}

void soft_cap(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* x = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        each(op.width, [&](int64_t i, Mask mask) { store(y + i, mask, capped(load(x + i, mask), op.soft_cap)); });
    }
}
