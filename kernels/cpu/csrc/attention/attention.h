// Shared by both attention kernels (attention.cpp, attention_bf16.cpp): where a head's queries and slots are.
#pragma once
#include <algorithm>

#include "attention_pieces.h"
#include "../vec/micro.h"
#include "../vec/tanh.h"
#include "../vec/transpose.h"

namespace {

// How many elements apart rows of a chunk's scores and weights are where they are multiplied as bfloat16: an odd number of lines,
// so that rows do not share a few sets of the caches.
constexpr int64_t kScoreStride = kChunk + 16, kWeightStride = kChunk + 32;

// Copies a token's query, rotated if that is left to attention.
void find_query(const Op& op, const Pass& pass, int64_t token, int64_t head, float* to) {
    if (op.fused_rope) return rotate_query(op, pass, token, head, to);
    memcpy(to, op.x + token * op.x_stride + head * op.width, op.width * sizeof(float));
}

// The slots of one head of a cache.
struct Slots {
    const char* cache;
    const int64_t* table;
    int64_t head, num_heads, block_size, slot_bytes, head_bytes;
    const char* at(int64_t block, int64_t slot) const { return cache + (table[block] * num_heads + head) * head_bytes + slot * slot_bytes; }
    // Copies the scales of `count` positions of an 8-bit cache; sets those after them, up to `padded`, to 0.
    void scales(int64_t first, int64_t count, int64_t padded, float* to) const {
        for (int64_t i = 0, block = first / block_size, slot = first % block_size; i < count; block++, slot = 0) {
            int64_t some = std::min(count - i, block_size - slot);
            memcpy(to + i, reinterpret_cast<const float*>(at(block, block_size)) + slot, some * sizeof(float));
            i += some;
        }
        std::fill(to + count, to + padded, 0.0f);
    }
    // The panel that begins at a position, if keys are stored transposed.
    const uint32_t* panel(int64_t position) const {
        return reinterpret_cast<const uint32_t*>(at(position / block_size, position % block_size));
    }
};
// The slots of head `h` of a piece.
Slots slots_of(const void* cache, const Op& op, const Pass& pass, const Piece& piece, int64_t element_bytes, int64_t h = 0) {
    bool one_for_all = op.keys == op.values;  // whatever groups of heads a piece has
    return {static_cast<const char*>(cache), pass.tables + pass.table_start[piece.sequence], one_for_all ? 0 : piece.head + h,
            one_for_all ? 1 : op.num_kv_heads, pass.block_size, op.width * element_bytes, head_bytes(op.stored, pass.block_size, op.width)};
}

// Prefetches the slots that will be read next. Blocks are scattered, so the hardware prefetcher cannot follow them.
struct SlotPrefetch {
    Slots slots;
    int64_t block, slot, left;  // in slots
    const char *p, *end;        // of the current block
    int64_t lines;
    SlotPrefetch(const Slots& s, int64_t from, int64_t to, int64_t num_calls)
        : slots(s), block(from / s.block_size), slot(from % s.block_size), left(std::max<int64_t>(0, to - from)), p(nullptr), end(nullptr) {
        int64_t total = (left * s.head_bytes / s.block_size + 63) / 64;
        lines = (total + num_calls - 1) / std::max<int64_t>(1, num_calls);
    }
    void advance() {
        for (int64_t wanted = lines; wanted > 0;) {
            if (p >= end) {
                if (left == 0) return;
                int64_t count = std::min(left, slots.block_size - slot);
                p = slots.at(block++, slot);
                end = slot + count == slots.block_size ? p + slots.head_bytes - slot * slots.slot_bytes : p + count * slots.slot_bytes;
                slot = 0;
                left -= count;
            }
            int64_t run = std::min(wanted, (end - p + 63) / 64);
            wanted -= run;
            for (; run > 0; run--, p += 64) prefetch(p);
        }
    }
};

// The end of the slots to prefetch. All slots of the last panel are read, written or not; results of unwritten ones are
// ignored.
int64_t whole_panels(int64_t end, const Op& op, const Pass& pass) {
    return keys_are_transposed(op, pass) ? (end + kSlots - 1) / kSlots * kSlots : end;
}

// Multiplies a row of scores, or weights, with the scales of its keys, or values.
void scale_row(float* s, const float* scales, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) store(s + i, load(s + i) * load(scales + i));
}

}  // namespace
