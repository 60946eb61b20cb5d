// Writing keys and values to the cache: those of write_kv, and those that attention norms and rotates itself.
//
// What must always hold: a slot's bits follow from its token alone, whether it is written by itself or with others.
#include <algorithm>

#include "../vec/buffer.h"
#include "../rows/norm.h"
#include "../program.h"
#include "../rows/rope.h"
#include "../vec/transpose.h"

namespace {

template <class T>
void write(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k, const float* v) {
    int64_t slot = pass.positions[n] % pass.block_size;
    int64_t first = (pass.blocks[n] * op.num_kv_heads + head) * pass.block_size * op.width;
    T *keys = static_cast<T*>(op.keys) + first, *values = static_cast<T*>(op.values) + first + slot * op.width;
    bool transposed = keys_are_transposed(op, pass);
    for (int64_t i = 0; i < op.width; i++) narrow(k[i], keys + key_offset<T>(transposed, op.width, slot, i));
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
    static thread_local Buffer<int8_t> codes;
    codes.resize(op.width);
    int64_t slot = pass.positions[n] % pass.block_size;
    int64_t first = (pass.blocks[n] * op.num_kv_heads + head) * head_bytes(kInt8, pass.block_size, op.width);
    int8_t *keys = static_cast<int8_t*>(op.keys) + first, *values = static_cast<int8_t*>(op.values) + first;
    int64_t scale = pass.block_size * op.width + slot * static_cast<int64_t>(sizeof(float));
    float step = round_head(k, op.width, codes.data());
    bool transposed = keys_are_transposed(op, pass);
    for (int64_t i = 0; i < op.width; i++) keys[key_offset<int8_t>(transposed, op.width, slot, i)] = codes[i];
    memcpy(keys + scale, &step, sizeof step);
    step = round_head(v, op.width, values + slot * op.width);
    memcpy(values + scale, &step, sizeof step);
}
void write(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k, const float* v) {
    if (op.stored == kInt8) return write<int8_t>(op, pass, n, head, k, v);
    if (op.stored == kBfloat16) write<bf16>(op, pass, n, head, k, v);
    else write<float>(op, pass, n, head, k, v);
}

// Writes the keys and values of `kSlots` tokens that fill a panel, from token `n` on.
template <class T>
void write_panel(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    static thread_local Buffer<T> rounded;
    rounded.resize(kSlots * op.width);
    const uint32_t* rows[kSlots];
    for (int64_t i = 0; i < kSlots * op.width; i++) narrow(k[i], rounded.data() + i);
    for (int64_t i = 0; i < kSlots; i++) rows[i] = reinterpret_cast<const uint32_t*>(rounded.data() + i * op.width);
    int64_t slot = pass.positions[n] % pass.block_size, words = op.width * static_cast<int64_t>(sizeof(T)) / 4;
    int64_t first = ((pass.blocks[n] * op.num_kv_heads + head) * pass.block_size + slot) * op.width;
    uint32_t* panel = reinterpret_cast<uint32_t*>(static_cast<T*>(op.keys) + first);
    for (int64_t word = 0; word < words; word += kTranspose)
        for (int64_t i = 0; i < kSlots; i += kTranspose) transpose(rows + i, word, panel + word * kSlots + i, kSlots);
    T* values = static_cast<T*>(op.values) + first;
    for (int64_t i = 0; i < kSlots; i++) {
        const float* v = op.v + (n + i) * op.x_stride + head * op.width;
        for (int64_t j = 0; j < op.width; j++) narrow(v[j], values + i * op.width + j);
    }
}

// Whether the `kSlots` tokens from `n` on, all before `end`, fill a panel of transposed keys.
bool fill_panel(const Op& op, const Pass& pass, int64_t n, int64_t end) {
    if (op.stored == kInt8 || !keys_are_transposed(op, pass) || pass.positions[n] % kSlots || end - n < kSlots) return false;
    int64_t last = n + kSlots - 1;
    return pass.blocks[last] == pass.blocks[n] && pass.positions[last] - pass.positions[n] == kSlots - 1;
}

// Norms a head, if there is a weight for that, and rotates it.
void norm_and_rotate(const Op& op, int64_t position, const float* x, const float* weight, float* to) {
    if (weight) norm(x, weight, to, op.width, op.eps), x = to;
    rotate_head(op, position, x, to);
}

void rotate_key(const Op& op, const Pass& pass, int64_t n, int64_t head, float* to) {
    norm_and_rotate(op, pass.positions[n], op.z + n * op.z_stride + head * op.width, op.key_norm, to);
}

}  // namespace

void write_kv(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++)
        for (int64_t h = 0; h < op.num_kv_heads; h++)
            write(op, pass, s.begin, h, op.x + s.begin * op.x_stride + h * op.width, op.z + s.begin * op.z_stride + h * op.width);
}

void rotate_query(const Op& op, const Pass& pass, int64_t n, int64_t head, float* to) {
    norm_and_rotate(op, pass.positions[n], op.x + n * op.x_stride + head * op.width, op.norm, to);
}

void rotate_and_write(const Op& op, const Pass& pass, int64_t n, int64_t head) {
    static thread_local Buffer<float> key;
    key.resize(op.width);
    rotate_key(op, pass, n, head, key.data());
    write(op, pass, n, head, key.data(), op.v + n * op.x_stride + head * op.width);
}

void rotate_and_write(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t heads = op.num_kv_heads;
    if (pass.num_tokens < kSlots * worker.num_threads) {
        for (Share s(pass.num_tokens * heads, worker); s.begin < s.end; s.begin++)
            rotate_and_write(op, pass, s.begin / heads, s.begin % heads);
        return;
    }
    // By panels, if tokens fill them: a transposed key has a word in each line of its panel.
    static thread_local Buffer<float> keys;
    keys.resize(kSlots * op.width);
    for (Share s(pass.num_tokens, worker); s.begin < s.end;) {
        bool whole = fill_panel(op, pass, s.begin, s.end);
        for (int64_t h = 0; h < heads; h++) {
            if (!whole) {
                rotate_and_write(op, pass, s.begin, h);
                continue;
            }
            for (int64_t i = 0; i < kSlots; i++) rotate_key(op, pass, s.begin + i, h, keys.data() + i * op.width);
            if (op.stored == kBfloat16) write_panel<bf16>(op, pass, s.begin, h, keys.data());
            else write_panel<float>(op, pass, s.begin, h, keys.data());
        }
        s.begin += whole ? kSlots : 1;
    }
}
