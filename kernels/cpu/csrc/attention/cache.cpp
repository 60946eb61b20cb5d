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

// Where a head of the block of token `n` begins.
template <class T>
T* head_at(void* cache, const Op& op, const Pass& pass, int64_t n, int64_t head) {
    int64_t bytes = head_bytes(op.stored, pass.block_size, op.width);
    return reinterpret_cast<T*>(static_cast<char*>(cache) + (pass.blocks[n] * op.num_kv_heads + head) * bytes);
}

template <class T>
void write_key(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    int64_t slot = pass.positions[n] % pass.block_size;
    T* keys = head_at<T>(op.keys, op, pass, n, head);
    bool transposed = keys_are_transposed(op, pass);
    for (int64_t i = 0; i < op.width; i++) narrow(k[i], keys + key_offset<T>(transposed, op.width, slot, i));
}
template <class T>
void write_value(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* v) {
    T* values = head_at<T>(op.values, op, pass, n, head) + pass.positions[n] % pass.block_size * op.width;
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
void write_key<int8_t>(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    static thread_local Buffer<int8_t> codes;
    codes.resize(op.width);
    int64_t slot = pass.positions[n] % pass.block_size;
    int8_t* keys = head_at<int8_t>(op.keys, op, pass, n, head);
    float step = round_head(k, op.width, codes.data());
    bool transposed = keys_are_transposed(op, pass);
    for (int64_t i = 0; i < op.width; i++) keys[key_offset<int8_t>(transposed, op.width, slot, i)] = codes[i];
    memcpy(keys + pass.block_size * op.width + slot * sizeof step, &step, sizeof step);
}
template <>
void write_value<int8_t>(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* v) {
    int64_t slot = pass.positions[n] % pass.block_size;
    int8_t* values = head_at<int8_t>(op.values, op, pass, n, head);
    float step = round_head(v, op.width, values + slot * op.width);
    memcpy(values + pass.block_size * op.width + slot * sizeof step, &step, sizeof step);
}
void write_key(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    if (op.stored == kInt8) write_key<int8_t>(op, pass, n, head, k);
    else if (op.stored == kBfloat16) write_key<bf16>(op, pass, n, head, k);
    else write_key<float>(op, pass, n, head, k);
}
void write_value(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* v) {
    if (op.stored == kInt8) write_value<int8_t>(op, pass, n, head, v);
    else if (op.stored == kBfloat16) write_value<bf16>(op, pass, n, head, v);
    else write_value<float>(op, pass, n, head, v);
}

// Writes the keys of `kSlots` tokens that fill a panel, from token `n` on.
template <class T>
void write_panel(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    static thread_local Buffer<T> rounded;
    rounded.resize(kSlots * op.width);
    const uint32_t* rows[kSlots];
    for (int64_t i = 0; i < kSlots * op.width; i++) narrow(k[i], rounded.data() + i);
    for (int64_t i = 0; i < kSlots; i++) rows[i] = reinterpret_cast<const uint32_t*>(rounded.data() + i * op.width);
    int64_t words = op.width * static_cast<int64_t>(sizeof(T)) / 4;
    T* first = head_at<T>(op.keys, op, pass, n, head) + pass.positions[n] % pass.block_size * op.width;
    uint32_t* panel = reinterpret_cast<uint32_t*>(first);
    for (int64_t word = 0; word < words; word += kTranspose)
        for (int64_t i = 0; i < kSlots; i += kTranspose) transpose(rows + i, word, panel + word * kSlots + i, kSlots);
}
void write_panel(const Op& op, const Pass& pass, int64_t n, int64_t head, const float* k) {
    if (op.stored == kBfloat16) write_panel<bf16>(op, pass, n, head, k);
    else write_panel<float>(op, pass, n, head, k);
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
        for (int64_t h = 0; h < op.num_kv_heads; h++) {
            write_key(op, pass, s.begin, h, op.x + s.begin * op.x_stride + h * op.width);
            write_value(op, pass, s.begin, h, op.z + s.begin * op.z_stride + h * op.width);
        }
}

void rotate_query(const Op& op, const Pass& pass, int64_t n, int64_t head, float* to) {
    norm_and_rotate(op, pass.positions[n], op.x + n * op.x_stride + head * op.width, op.norm, to);
}

void rotate_and_write(const Op& op, const Pass& pass, int64_t n, int64_t head) {
    static thread_local Buffer<float> key;
    key.resize(op.width);
    rotate_key(op, pass, n, head, key.data());
    write_key(op, pass, n, head, key.data());
    write_value(op, pass, n, head, op.v + n * op.x_stride + head * op.width);
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
            write_panel(op, pass, s.begin, h, keys.data());
            for (int64_t i = 0; i < kSlots; i++) write_value(op, pass, s.begin + i, h, op.v + (s.begin + i) * op.x_stride + h * op.width);
        }
        s.begin += whole ? kSlots : 1;
    }
}

void take_head(const Op& op, const Pass& pass, int64_t n, int64_t count, int64_t head, float* x) {
    int64_t width = op.width, key = head - op.num_heads, value = key - op.num_kv_heads, end = n + count;
    if (value >= 0) {
        for (; n < end; n++, x += width) write_value(op, pass, n, value, x);
        return;
    }
    for (int64_t i = 0; i < count; i++) norm_and_rotate(op, pass.positions[n + i], x + i * width, key < 0 ? op.norm : op.key_norm, x + i * width);
    for (int64_t step; n < end; n += step, x += step * width) {
        step = 1;
        if (key < 0) {
            bf16* to = reinterpret_cast<bf16*>(const_cast<float*>(op.x) + n * op.x_stride) + head * width;
            for (int64_t i = 0; i < width; i++) narrow(x[i] * op.scale, to + i);
        } else if (fill_panel(op, pass, n, end)) {
            write_panel(op, pass, n, key, x);
            step = kSlots;
        } else {
            write_key(op, pass, n, key, x);
        }
    }
}
