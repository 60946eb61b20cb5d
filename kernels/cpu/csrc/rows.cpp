// What is done to each token's row by itself: norms, rotary embedding, writing the cache, SiLU.
//
// What must always hold: a thread has the same rows in each of these, so that one of them may follow another (Op::joined)
// before all threads have done with the first.
#include <algorithm>

#include "program.h"
#include "vec.h"

namespace {

// x times this is x divided by its root mean square.
float inverse_rms(const float* x, int64_t width, float eps) {
    Vec squares = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_lanes(squares);
    for (; i < width; i++) sum = std::fma(x[i], x[i], sum);
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
}

void norm(const float* x, const float* weight, float* y, int64_t width, float eps) {
    float r = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i++) y[i] = x[i] * r * weight[i];
}

template <class T>
void write(const Op& op, const Pass& pass, int64_t n, int64_t head) {
    int64_t slot = pass.positions[n] % pass.block_size;
    int64_t at = ((pass.blocks[n] * op.num_kv_heads + head) * pass.block_size + slot) * op.width;
    const float* k = op.x + n * op.x_stride + head * op.width;
    const float* v = op.z + n * op.z_stride + head * op.width;
    for (int64_t i = 0; i < op.width; i++) narrow(k[i], static_cast<T*>(op.keys) + at + i);
    for (int64_t i = 0; i < op.width; i++) narrow(v[i], static_cast<T*>(op.values) + at + i);
}

}  // namespace

void gather(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        memcpy(op.y + s.begin * op.y_stride, op.x + pass.looked_at[s.begin] * op.x_stride, op.width * sizeof(float));
}

// Over each of num_heads pieces of a row.
void rms_norm(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_heads; h++)
            norm(op.x + s.begin * op.x_stride + h * op.width, static_cast<const float*>(op.weight),
                 op.y + s.begin * op.y_stride + h * op.width, op.width, op.eps);
}

void rope(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t half = op.out_width / 2;
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* cos = op.cos + pass.positions[s.begin] * half;
        const float* sin = op.sin + pass.positions[s.begin] * half;
        for (int64_t h = 0; h < op.num_heads; h++) {
            const float* x = op.x + s.begin * op.x_stride + h * op.width;
            float* y = op.y + s.begin * op.y_stride + h * op.width;
            for (int64_t i = 0; i < half; i++) {
                float a = x[i], b = x[half + i];
                y[i] = a * cos[i] - b * sin[i];
                y[half + i] = b * cos[i] + a * sin[i];
            }
            for (int64_t i = op.out_width; i < op.width; i++) y[i] = x[i];
        }
    }
}

void write_kv(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_kv_heads; h++) {
            if (op.stored == kBfloat16) write<bf16>(op, pass, s.begin, h);
            else write<float>(op, pass, s.begin, h);
        }
}

// y = silu(first half of the row) * second half
void silu_mul(const Op& op, const Pass& pass, const Worker& worker) {
    auto activate = [](Vec gate, Vec up) {
        return gate / (splat(1) + exp(splat(0) - gate)) * up;
    };
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* gate = op.x + s.begin * op.x_stride;
        const float* up = gate + op.width;
        float* y = op.y + s.begin * op.y_stride;
        int64_t i = 0;
        for (; i + kLanes <= op.width; i += kLanes) store(y + i, activate(load(gate + i), load(up + i)));
        if (i < op.width) {
            Mask mask = first_lanes(op.width - i);
            store(y + i, mask, activate(load(gate + i, mask), load(up + i, mask)));
        }
    }
}

void add(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t i = 0; i < op.width; i++)
            op.y[s.begin * op.y_stride + i] = op.x[s.begin * op.x_stride + i] + op.z[s.begin * op.z_stride + i];
}
