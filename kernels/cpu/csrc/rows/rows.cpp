// Row-wise operations: norms, rotary embedding, SiLU, sums.
//
// What must always hold: a thread has the same rows in each of these, so that they may follow one another without a barrier
// (Op::no_barrier).
#include <cstring>

#include "activate.h"
#include "norm.h"
#include "../program.h"
#include "rope.h"

void gather(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        memcpy(op.y + s.begin * op.y_stride, op.x + pass.logits_indices[s.begin] * op.x_stride, op.width * sizeof(float));
}

// Norms each of the num_heads parts of a row.
void rms_norm(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_heads; h++)
            norm(op.x + s.begin * op.x_stride + h * op.width, static_cast<const float*>(op.weight),
                 op.y + s.begin * op.y_stride + h * op.width, op.width, op.eps);
}

void layer_norm(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        layer_norm(op.x + s.begin * op.x_stride, static_cast<const float*>(op.weight), op.bias, op.y + s.begin * op.y_stride, op.width, op.eps);
}

// The first elements of each row, normed, after the others.
void norm_latent(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t others = op.width - op.out_width;
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* x = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        memcpy(y, x + op.out_width, others * sizeof(float));
        norm(x, static_cast<const float*>(op.weight), y + others, op.out_width, op.eps);
    }
}

void rope(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_heads; h++)
            rotate_head(op, pass.positions[s.begin], op.x + s.begin * op.x_stride + h * op.width,
                      op.y + s.begin * op.y_stride + h * op.width);
}

// y = silu(first half of the row) * second half
void silu_mul(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* gate = op.x + s.begin * op.x_stride;
        const float* up = gate + op.width;
        float* y = op.y + s.begin * op.y_stride;
        int64_t i = 0;
        for (; i + kLanes <= op.width; i += kLanes) store(y + i, silu_mul(load(gate + i), load(up + i)));
        if (i < op.width) {
            Mask mask = first_lanes(op.width - i);
            store(y + i, mask, silu_mul(load(gate + i, mask), load(up + i, mask)));
        }
    }
}

void add(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t i = 0; i < op.width; i++)
            op.y[s.begin * op.y_stride + i] = op.x[s.begin * op.x_stride + i] + op.z[s.begin * op.z_stride + i];
}
