// Paged causal attention: one kernel for decode, prefill, chunked prefill and mixed batches.
//
// Keys are processed in chunks on a grid over absolute positions, in ascending order, with a running maximum and sum (online
// softmax: Milakov and Gimelshein, arXiv:1805.02867). A piece of work is a few tokens of one sequence and one key/value
// head; the query heads that share it are rows of the same product.
//
// What must always hold: a row's chunks, and the order within a chunk, follow from its position and the window alone. Keys
// that it does not see have a weight of exactly 0, and a chunk with no other keys leaves the row unchanged. Values of slots
// that the sequence has not written are never read; unwritten keys in a panel with written ones are multiplied, but their
// scores are overwritten before use.
//
// An 8-bit cache is multiplied as the integers that it holds: a key's scale is applied to its score, a value's to its weight.
#include "attention.h"
#include "../vec/buffer.h"

namespace {

constexpr int64_t kRowsPerPiece = 48;  // query rows per piece: each chunk is packed once for all of them

constexpr int64_t kKeysAtOnce = 32;  // keys that are multiplied at a time
static_assert(kKeysAtOnce % kPanel == 0);

PackedF32 packed_keys(const uint32_t* p, int64_t panel_words, const float*) {
    return {reinterpret_cast<const float*>(p), panel_words};
}
PackedBf16 packed_keys(const uint32_t* p, int64_t panel_words, const bf16*) {
    return {reinterpret_cast<const bf16*>(p), panel_words * 2};
}

// Keys that blocks store transposed: two panels at independent addresses.
template <class T>
struct TransposedKeys {
    const uint32_t* panels[kKeysAtOnce / kSlots];
    int64_t first;  // Vec
    static constexpr bool kPaired = sizeof(T) == 2;
    const int8_t* codes(int64_t k, int v) const {
        int64_t lane = (first + v) * kLanes;
        return reinterpret_cast<const int8_t*>(panels[lane / kSlots]) + k * kSlots + lane % kSlots;
    }
    const uint32_t* words(int64_t word, int v) const {
        int64_t lane = (first + v) * kLanes;
        return panels[lane / kSlots] + word * kSlots + lane % kSlots;
    }
    Vec even(int64_t k, int v) const {
        if constexpr (sizeof(T) == 1) return load(codes(k, v));
        else if constexpr (kPaired) return low_halves(reinterpret_cast<const bf16*>(words(k / 2, v)));
        else return load(reinterpret_cast<const float*>(words(k, v)));
    }
    Vec odd(int64_t k, int v) const {
        if constexpr (kPaired) return high_halves(reinterpret_cast<const bf16*>(words(k / 2, v)));
        else return even(k, v);
    }
    TransposedKeys columns(int64_t v) const { return {{panels[0], panels[1]}, first + v}; }
};

// Buffers that a thread keeps between passes.
struct Scratch {
    Buffer<float> queries, scores, results, maxima, sums, scales;
    Buffer<uint32_t> keys, zeros;
    void fit(int64_t rows, int64_t width) {
        queries.resize(std::max<size_t>(queries.size(), rows * width));
        results.resize(std::max<size_t>(results.size(), rows * width));
        scores.resize(std::max<size_t>(scores.size(), rows * kChunk));
        maxima.resize(std::max<size_t>(maxima.size(), rows));
        sums.resize(std::max<size_t>(sums.size(), rows));
        scales.resize(2 * kChunk);
        keys.resize(std::max<size_t>(keys.size(), kKeysAtOnce * width));
        zeros.resize(std::max<size_t>(zeros.size(), width));
    }
};

// results += weights x values; bfloat16 results are in the order of RowHalves if the width allows it.
template <class N>
void add_values(int64_t rows, const float* weights, const float* const* values, int64_t count, int64_t width, const Target& t, N& next) {
    multiply<6>(rows, PlainRows{weights, kChunk}, Rows<float>{values, 0}, count, width / kLanes, t, next);
}
template <class N>
void add_values(int64_t rows, const float* weights, const bf16* const* values, int64_t count, int64_t width, const Target& t, N& next) {
    if (width % (2 * kLanes)) multiply<6>(rows, PlainRows{weights, kChunk}, Rows<bf16>{values, 0}, count, width / kLanes, t, next);
    else multiply<6>(rows, PlainRows{weights, kChunk}, RowHalves{values, 0}, count, width / kLanes, t, next);
}
template <class N>
void add_values(int64_t rows, const float* weights, const int8_t* const* values, int64_t count, int64_t width, const Target& t, N& next) {
    multiply<6>(rows, PlainRows{weights, kChunk}, Rows<int8_t>{values, 0}, count, width / kLanes, t, next);
}
// Returns the index of element i of a head in these results.
int64_t result_index(int64_t, const float*, int64_t i) { return i; }
int64_t result_index(int64_t, const int8_t*, int64_t i) { return i; }
int64_t result_index(int64_t width, const bf16*, int64_t i) {
    if (width % (2 * kLanes)) return i;
    return i / (2 * kLanes) * (2 * kLanes) + i % 2 * kLanes + i % (2 * kLanes) / 2;
}

// Multiplies queries with keys that blocks store as rows, once these are transposed in scratch.keys.
template <class T>
void multiply_packed(int64_t rows, const PlainRows& queries, const Scratch& scratch, int64_t width, int64_t words, const Target& s) {
    NoPrefetch none;
    int64_t num_vecs = s.num_columns / kLanes;
    if constexpr (sizeof(T) == 1) {
        const uint32_t* panels = scratch.keys.data();
        multiply<4>(rows, queries, TransposedKeys<T>{{panels, panels + width * kSlots / 4}, 0}, width, num_vecs, s, none);
    } else {
        multiply<4>(rows, queries, packed_keys(scratch.keys.data(), words * kPanel, (T*)nullptr), width, num_vecs, s, none);
    }
}

// Converts a row of scores to weights of keys first..last (inclusive; may lie outside of the row's count), 0 for the others.
// Returns the factor by which the results of earlier chunks must be multiplied.
float softmax_chunk(float* s, int64_t count, int64_t first, int64_t last, float cap, float* maximum, float* sum) {
    if (first >= count) {
        std::fill_n(s, count, 0.0f);
        return 1.0f;
    }
    if (cap > 0)
        for (int64_t i = 0; i < count; i += kLanes) store(s + i, capped(load(s + i), cap));
    for (int64_t i = 0; i < first; i++) s[i] = -INFINITY;
    for (int64_t i = std::max<int64_t>(0, last + 1); i < count; i++) s[i] = -INFINITY;
    Vec m = splat(*maximum);
    for (int64_t i = 0; i < count; i += kLanes) m = larger(m, load(s + i));
    float top = max_lanes(m);
    Vec total = splat(0);
    for (int64_t i = 0; i < count; i += kLanes) {
        Vec p = exp(load(s + i) - splat(top));
        store(s + i, p);
        total = total + p;
    }
    float kept = first_lane(exp(splat(*maximum - top)));
    *sum = *sum * kept + sum_lanes(total);
    *maximum = top;
    return kept;
}

// `next` is this thread's next piece, or null: its keys are prefetched.
template <class T>
void attend_piece(const Op& op, const Pass& pass, const Piece& piece, const Piece* next) {
    if (!is_needed(op, pass, piece)) return;
    static thread_local Scratch scratch;
    int64_t width = op.width, sharing = op.num_heads / op.num_kv_heads, rows = piece.num_tokens() * sharing;
    constexpr bool kScaled = sizeof(T) == 1;
    constexpr int64_t kStep = kScaled ? kSlots : kTranspose;  // keys, and words of each, that are transposed at a time
    int64_t words = kScaled ? width : width * static_cast<int64_t>(sizeof(T)) / 4;
    scratch.fit(rows, width);
    Slots key_slots = slots_of(op.keys, op, pass, piece, sizeof(T)), value_slots = slots_of(op.values, op, pass, piece, sizeof(T));

    for (int64_t r = 0; r < rows; r++) {
        float* query = scratch.queries.data() + r * width;
        int64_t token = piece.token(r / sharing), head = piece.head * sharing + r % sharing;
        find_query(op, pass, token, head, query);
        for (int64_t i = 0; i < width; i++) query[i] *= op.scale;
        load_state(op, piece, token, head, scratch.results.data() + r * width, width, &scratch.maxima[r], &scratch.sums[r]);
    }

    for (int64_t chunk = piece.start; chunk < piece.end; chunk += kChunk) {
        int64_t count = std::min(kChunk, piece.end - chunk), padded = (count + kPanel - 1) / kPanel * kPanel;
        bool transposed = keys_are_transposed(op, pass);
        const T* values[kChunk];
        const uint32_t* keys[kChunk];
        for (int64_t i = 0, block = chunk / pass.block_size, slot = chunk % pass.block_size; i < count; block++, slot = 0) {
            const char *key = key_slots.at(block, slot), *value = value_slots.at(block, slot);
            for (int64_t end = std::min(count, i + pass.block_size - slot); i < end; i++) {
                keys[i] = reinterpret_cast<const uint32_t*>(key);
                values[i] = reinterpret_cast<const T*>(value);
                key += key_slots.slot_bytes;
                value += value_slots.slot_bytes;
            }
        }
        for (int64_t i = count; i < padded; i++) keys[i] = scratch.zeros.data();
        float *key_scales = scratch.scales.data(), *value_scales = key_scales + kChunk;
        if (kScaled) {
            key_slots.scales(chunk, count, padded, key_scales);
            value_slots.scales(chunk, count, padded, value_scales);
        }
        // Values are prefetched while keys are multiplied, and the next keys while values are.
        int64_t key_calls = transposed ? (padded + kKeysAtOnce - 1) / kKeysAtOnce * ((width + kStride - 1) / kStride)
                                       : padded / kStep * (words / kStep);
        SlotPrefetch value_prefetch(value_slots, chunk, chunk + count, key_calls);
        for (int64_t group = 0; group < padded; group += kKeysAtOnce) {
            int64_t end = std::min(group + kKeysAtOnce, padded);
            for (int64_t i = group; i < end && !transposed; i += kStep)
                for (int64_t word = 0; word < words; word += kStep) {
                    value_prefetch.advance();
                    if constexpr (kScaled)
                        transpose(reinterpret_cast<const int8_t* const*>(keys + i), word,
                                  reinterpret_cast<int8_t*>(scratch.keys.data()) + ((i - group) * width + word * kSlots));
                    else transpose(keys + i, word, scratch.keys.data() + ((i - group) / kPanel * words + word) * kPanel + i % kPanel, kPanel);
                }
            for (int64_t part = 0; part < num_parts(rows); part++) {
                int64_t r = split(rows, part), together = split(rows, part + 1) - r;
                Target s{scratch.scores.data() + r * kChunk + group, kChunk, true, nullptr, nullptr, 0, end - group};
                PlainRows queries{scratch.queries.data() + r * width, width};
                NoPrefetch none;
                if (transposed) {
                    int64_t at = chunk + group;
                    TransposedKeys<T> two{{key_slots.panel(at), key_slots.panel(group + kSlots < count ? at + kSlots : at)}, 0};
                    if (part == 0) multiply<4>(together, queries, two, width, (end - group) / kLanes, s, value_prefetch);
                    else multiply<4>(together, queries, two, width, (end - group) / kLanes, s, none);
                } else {
                    multiply_packed<T>(together, queries, scratch, width, words, s);
                }
            }
        }
        bool few = num_parts(rows) == 1;
        int64_t value_calls = few ? (width / kLanes + 5) / 6 * ((count + kStride - 1) / kStride) : num_parts(rows);
        bool more = chunk + kChunk < piece.end;
        const Piece& after = more || !next ? piece : *next;
        int64_t from = more ? chunk + kChunk : next ? next->start : 0, to = more || next ? std::min(from + kChunk, after.end) : 0;
        SlotPrefetch key_prefetch(slots_of(op.keys, op, pass, after, sizeof(T)), from, whole_panels(to, op, pass), value_calls);
        for (int64_t part = 0; part < num_parts(rows); part++) {
            int64_t r = split(rows, part), together = split(rows, part + 1) - r;
            float* scores = scratch.scores.data() + r * kChunk;
            float* results = scratch.results.data() + r * width;
            for (int64_t m = 0; m < together; m++) {
                int64_t position = pass.positions[piece.token((r + m) / sharing)];
                if (kScaled) scale_row(scores + m * kChunk, key_scales, padded);
                float kept = softmax_chunk(scores + m * kChunk, padded, first_seen(op, position) - chunk, position - chunk, op.soft_cap,
                                   &scratch.maxima[r + m], &scratch.sums[r + m]);
                if (kScaled) scale_row(scores + m * kChunk, value_scales, padded);
                for (int64_t i = 0; i < width; i++) results[m * width + i] *= kept;
            }
            Target o{results, width, false, nullptr, nullptr, 0, width};
            if (few) {
                add_values(together, scores, values, count, width, o, key_prefetch);
            } else {
                NoPrefetch none;
                key_prefetch.advance();
                add_values(together, scores, values, count, width, o, none);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = piece.token(r / sharing), head = piece.head * sharing + r % sharing;
        float *results = scratch.results.data() + r * width;
        if (piece.continues) {
            keep_state(op, piece, token, head, results, width, scratch.maxima[r], scratch.sums[r]);
            continue;
        }
        float* y = op.y + token * op.y_stride + head * width;
        for (int64_t i = 0; i < width; i++) results[i] /= scratch.sums[r];
        for (int64_t i = 0; i < width; i++) y[i] = results[result_index(width, (T*)nullptr, i)];
    }
}

}  // namespace

// See attention_bf16.cpp; null if the instruction set does not support it.
__attribute__((weak)) void attend_bf16(const Op&, const Pass&, const Worker&);

// Where all heads have one key that is also their value: the groups of heads that are pieces of their own, if there are fewer
// tokens than threads. Each group packs the keys anew.
static int64_t head_groups(const Op& op, const Pass& pass, int64_t num_threads) {
    constexpr int64_t kFewest = 4;  // heads of a group
    int64_t groups = 1;
    while (pass.num_tokens * groups < num_threads && op.num_heads % (2 * groups) == 0 && op.num_heads >= 2 * groups * kFewest) groups *= 2;
    return groups;
}

void attend(const Op& original, const Pass& pass, const Worker& worker) {
    if (pass.num_sequences == 0) return;
    Op op = original;
    if (op.keys == op.values) op.num_kv_heads = head_groups(op, pass, worker.num_threads);
    bool pairs = attend_bf16 && op.stored != kFloat32;
    if (pairs && op.joined && heads_are_taken(*op.joined, op, pass)) op.fused_rope = 0, op.x_rounded = 1, op.x_stride *= 2;
    // A step that only decodes needs no barrier between writing the cache and reading it.
    bool written_by_reader = op.fused_rope && !pairs && one_piece_per_head(op, pass, kRowsPerPiece);
    if (op.fused_rope && !written_by_reader) {
        rotate_and_write(op, pass, worker);
        worker.wait();
    }
    if (pairs) return attend_bf16(op, pass, worker);
    auto go = [&](const Piece& piece, const Piece* next) {
        if (op.stored == kBfloat16) attend_piece<bf16>(op, pass, piece, next);
        else if (op.stored == kInt8) attend_piece<int8_t>(op, pass, piece, next);
        else attend_piece<float>(op, pass, piece, next);
    };
    SharedPieces shared(op, *worker.shared, kRowsPerPiece, worker.num_threads);
    shared.take(worker, go);
    Pieces pieces(op, pass, *worker.shared, shared, kRowsPerPiece, 0, worker.num_threads);
    Worker second = worker.in_second_phase();
    Piece piece, next;
    bool more = pieces.find(worker.thread, &piece);
    while (more) {
        more = pieces.find(worker.num_threads + second.next(), &next);
        if (written_by_reader)
            for (int64_t token = piece.first; token < piece.last; token++) rotate_and_write(op, pass, token, piece.head);
        go(piece, more ? &next : nullptr);
        piece = next;
    }
}
