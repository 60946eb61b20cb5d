// Row-wise operations: norms, rotary embedding, writing the cache, SiLU.
//
// What must always hold: a thread has the same rows in each of these, so that they may follow one another without a barrier
// (Op::no_barrier).
#include <algorithm>
#include <vector>

#include "activate.h"
#include "norm.h"
#include "program.h"

namespace {

template <class T>
void write(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k, const float* v) {
    int64_t slot = pass.positions[n] % pass.block_size;
    int64_t first = (pass.blocks[n] * op.num_kv_heads + head) * pass.block_size * op.width;
    T *keys = static_cast<T*>(op.keys) + first, *values = static_cast<T*>(op.values) + first + slot * op.width;
    for (int64_t i = 0; i < op.width; i++) narrow(k[i], keys + key_offset<T>(pass.block_size, op.width, slot, i));
    for (int64_t i = 0; i < op.width; i++) narrow(v[i], values + i);
}

// Rounds a head to 8 bits, half to even, in steps of 1/127 of its largest magnitude; returns the step. Infinity and NaN make
// the step NaN, so that they are not lost; in a head of zeros it is 0.
float round_head(const float* x, int64_t width, int8_t* to) {
    Vec largest = splat(0), broken = splat(0);
    for (int64_t i = 0; i < width; i += kLanes) {
        Vec v = load(x + i);
        largest = larger(larger(v, splat(0) - v), largest);
        broken = broken + v * splat(0);
    }
    float step = max_lanes(largest) / 127 + sum_lanes(broken);
    bool has_codes = step > 0;
    for (int64_t i = 0; i < width; i += kLanes) {
        float rounded[kLanes];
        store(rounded, smaller(larger(nearest_integer(load(x + i) / splat(has_codes ? step : 1)), splat(-127)), splat(127)));
        for (int j = 0; j < kLanes; j++) to[i + j] = has_codes ? static_cast<int8_t>(rounded[j]) : 0;
    }
    return step;
}
template <>
void write<int8_t>(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k, const float* v) {
    static thread_local std::vector<int8_t> codes;
    codes.resize(op.width);
    int64_t slot = pass.positions[n] % pass.block_size;
    int64_t first = (pass.blocks[n] * op.num_kv_heads + head) * head_bytes(kInt8, pass.block_size, op.width);
    int8_t *keys = static_cast<int8_t*>(op.keys) + first, *values = static_cast<int8_t*>(op.values) + first;
    int64_t scale = pass.block_size * op.width + slot * static_cast<int64_t>(sizeof(float));
    float step = round_head(k, op.width, codes.data());
    for (int64_t i = 0; i < op.width; i++) keys[key_offset<int8_t>(pass.block_size, op.width, slot, i)] = codes[i];
    memcpy(keys + scale, &step, sizeof step);
    step = round_head(v, op.width, values + slot * op.width);
    memcpy(values + scale, &step, sizeof step);
}
void write(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k, const float* v) {
    if (op.stored == kInt8) return write<int8_t>(op, pass, n, head, k, v);
    if (op.stored == kBfloat16) write<bf16>(op, pass, n, head, k, v);
    else write<float>(op, pass, n, head, k, v);
}

// Rotates one head by its position; y may be x.
void rotate_head(const Op& op, int64_t position, const float* x, float* y) {
    int64_t half = op.out_width / 2;
    const float *cos = op.cos + position * half, *sin = op.sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        y[i] = a * cos[i] - b * sin[i];
        y[half + i] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = op.out_width; i < op.width; i++) y[i] = x[i];
}

}  // namespace

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

void rope(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_heads; h++)
            rotate_head(op, pass.positions[s.begin], op.x + s.begin * op.x_stride + h * op.width,
                      op.y + s.begin * op.y_stride + h * op.width);
}

void write_kv(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_kv_heads; h++)
            write(op, pass, s.begin, h, op.x + s.begin * op.x_stride + h * op.width, op.z + s.begin * op.z_stride + h * op.width);
}

// Norms and rotates the query heads of a key/value head into op.scratch; norms and rotates its key, and writes it to the
// cache with its value.
void rotate_and_write(const Op& op, const Pass& pass, int64_t n, int64_t head) {
    int64_t sharing = op.num_heads / op.num_kv_heads, position = pass.positions[n];
    static thread_local std::vector<float> row;
    row.resize(op.width);
    auto one = [&](const float* x, const float* weight, float* y) {
        if (weight) norm(x, weight, row.data(), op.width, op.eps);
        rotate_head(op, position, weight ? row.data() : x, y);
    };
    for (int64_t h = head * sharing; h < (head + 1) * sharing; h++)
        one(op.x + n * op.x_stride + h * op.width, op.norm, op.scratch + (n * op.num_heads + h) * op.width);
    static thread_local std::vector<float> key;
    key.resize(op.width);
    one(op.z + n * op.z_stride + head * op.width, op.key_norm, key.data());
    write(op, pass, n, head, key.data(), op.v + n * op.x_stride + head * op.width);
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
