// Paged causal attention: decode, prefill, chunks of it and mixed batches are one kernel.
//
// A query meets its keys in chunks on a grid over absolute positions, in order, with a running maximum and sum (online
// softmax: Milakov and Gimelshein, arXiv:1805.02867). A piece of work is a few tokens of one sequence and one key/value
// head; the query heads that share it are more rows of the same product.
//
// What must always hold: a row's chunks, and the order within one, follow from its position and the window alone. Keys
// that it does not see meet it with a weight of exactly 0, and a chunk of nothing else leaves it as it was; slots that the
// sequence has not written are not read at all.
#include <vector>

#include "micro.h"
#include "program.h"
#include "tanh.h"

namespace {

constexpr int64_t kChunk = 256;
constexpr int64_t kRowsOfWork = 48;  // query rows of a piece: each chunk is packed once for all of them

constexpr int64_t kTogether = 32;    // keys that are multiplied at once
static_assert(kTogether % kPanel == 0);

// Some tokens of a sequence and one key/value head.
struct Piece {
    int64_t sequence, head;
    int64_t first, last;  // tokens first..last (exclusive), counted from the sequence's first in the pass
    int64_t start, end;   // positions that they see, the first one at the beginning of a chunk
};

// Where one head's slots of a cache lie.
struct Slots {
    const char* cache;
    const int64_t* table;
    int64_t head, num_heads, block_size, slot_bytes;
    const char* at(int64_t block, int64_t slot) const {
        return cache + ((table[block] * num_heads + head) * block_size + slot) * slot_bytes;
    }
};
Slots slots_of(const void* cache, const Op& op, const Pass& pass, const Piece& piece, int64_t element_bytes) {
    return {static_cast<const char*>(cache), pass.tables + pass.table_start[piece.sequence], piece.head, op.num_kv_heads,
            pass.block_size, op.width * element_bytes};
}

// Slots that will be read next, block by block: they lie anywhere, and no hardware guesses where the next one begins.
struct Coming {
    Slots slots;
    int64_t block, slot, left;  // in slots
    const char *p, *end;        // of the block at hand
    int64_t lines;
    Coming(const Slots& s, int64_t from, int64_t to, int64_t asks)
        : slots(s), block(from / s.block_size), slot(from % s.block_size), left(std::max<int64_t>(0, to - from)), p(nullptr), end(nullptr) {
        int64_t total = (left * s.slot_bytes + 63) / 64;
        lines = (total + asks - 1) / std::max<int64_t>(1, asks);
    }
    void ask() {
        for (int64_t wanted = lines; wanted > 0;) {
            if (p >= end) {
                if (left == 0) return;
                int64_t count = std::min(left, slots.block_size - slot);
                p = slots.at(block++, slot);
                end = p + count * slots.slot_bytes;
                slot = 0;
                left -= count;
            }
            int64_t run = std::min(wanted, (end - p + 63) / 64);
            wanted -= run;
            for (; run > 0; run--, p += 64) prefetch(p);
        }
    }
};

constexpr int64_t kTurned = 8;

// 8 keys x 8 words into 8 words x 8 keys of a panel.
void transpose(const uint32_t* const* rows, int64_t word, uint32_t* to) {
    auto half = [&](int i, int64_t at) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + word + at)); };
    for (int64_t at = 0; at < kTurned; at += 4) {
        __m256 r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(half(i, at)), half(i + 4, at), 1);
        __m256 a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
        __m256 c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
        float* p = reinterpret_cast<float*>(to + at * kPanel);
        _mm256_storeu_ps(p, _mm256_shuffle_ps(a, c, 0x44));
        _mm256_storeu_ps(p + kPanel, _mm256_shuffle_ps(a, c, 0xee));
        _mm256_storeu_ps(p + 2 * kPanel, _mm256_shuffle_ps(b, d, 0x44));
        _mm256_storeu_ps(p + 3 * kPanel, _mm256_shuffle_ps(b, d, 0xee));
    }
}

PackedF32 packed_keys(const uint32_t* p, int64_t panel_words, const float*) {
    return {reinterpret_cast<const float*>(p), panel_words};
}
PackedBf16 packed_keys(const uint32_t* p, int64_t panel_words, const bf16*) {
    return {reinterpret_cast<const bf16*>(p), panel_words * 2};
}

// Turn a row of scores into weights: those of keys first..last (inclusive; may lie outside of the row's count), 0 for the
// others. Gives what the earlier chunks' results are to be multiplied with.
float weigh(float* s, int64_t count, int64_t first, int64_t last, float cap, float* maximum, float* sum) {
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

// What a thread keeps from pass to pass.
struct Scratch {
    std::vector<float> queries, scores, results, maxima, sums;
    std::vector<uint32_t> keys, zeros;
    void fit(int64_t rows, int64_t width) {
        queries.resize(std::max<size_t>(queries.size(), rows * width));
        results.resize(std::max<size_t>(results.size(), rows * width));
        scores.resize(std::max<size_t>(scores.size(), rows * kChunk));
        maxima.resize(std::max<size_t>(maxima.size(), rows));
        sums.resize(std::max<size_t>(sums.size(), rows));
        keys.resize(std::max<size_t>(keys.size(), kTogether * width));
        zeros.resize(std::max<size_t>(zeros.size(), width));
    }
};

// results += weights x values; bfloat16 results lie as RowHalves has them where that divides the width.
template <class N>
void add_values(int64_t rows, const float* weights, const float* const* values, int64_t count, int64_t width, const Target& t, N& next) {
    multiply<6>(rows, PlainRows{weights, kChunk}, Rows<float>{values, 0}, count, width / kLanes, t, next);
}
template <class N>
void add_values(int64_t rows, const float* weights, const bf16* const* values, int64_t count, int64_t width, const Target& t, N& next) {
    if (width % (2 * kLanes)) multiply<6>(rows, PlainRows{weights, kChunk}, Rows<bf16>{values, 0}, count, width / kLanes, t, next);
    else multiply<6>(rows, PlainRows{weights, kChunk}, RowHalves{values, 0}, count, width / kLanes, t, next);
}
// Where element i of a head lies in such results.
int64_t place(int64_t, const float*, int64_t i) { return i; }
int64_t place(int64_t width, const bf16*, int64_t i) {
    if (width % (2 * kLanes)) return i;
    return i / (2 * kLanes) * (2 * kLanes) + i % 2 * kLanes + i % (2 * kLanes) / 2;
}

// `next` is the piece that this thread has next, or null: its keys are asked for in time.
template <class T>
void attend_piece(const Op& op, const Pass& pass, const Piece& piece, const Piece* next) {
    static thread_local Scratch scratch;
    int64_t width = op.width, sharing = op.num_heads / op.num_kv_heads, rows = (piece.last - piece.first) * sharing;
    int64_t words = width * static_cast<int64_t>(sizeof(T)) / 4;
    scratch.fit(rows, width);
    int64_t begin = pass.query_start[piece.sequence];
    const int64_t* position = pass.positions + begin;
    Slots key_slots = slots_of(op.keys, op, pass, piece, sizeof(T)), value_slots = slots_of(op.values, op, pass, piece, sizeof(T));

    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        for (int64_t i = 0; i < width; i++)
            scratch.queries[r * width + i] = op.x[token * op.x_stride + head * width + i] * op.scale;
        scratch.maxima[r] = -INFINITY;
        scratch.sums[r] = 0;
    }
    std::fill_n(scratch.results.begin(), rows * width, 0.0f);

    int64_t window = op.window ? op.window : piece.end;
    for (int64_t chunk = piece.start; chunk < piece.end; chunk += kChunk) {
        int64_t count = std::min(kChunk, piece.end - chunk), padded = (count + kPanel - 1) / kPanel * kPanel;
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
        // While keys are multiplied the values come, and while these are, the next keys.
        Coming values_come(value_slots, chunk, chunk + count, padded / kTurned * (words / kTurned));
        for (int64_t group = 0; group < padded; group += kTogether) {
            int64_t end = std::min(group + kTogether, padded);
            for (int64_t i = group; i < end; i += kTurned)
                for (int64_t word = 0; word < words; word += kTurned) {
                    values_come.ask();
                    transpose(keys + i, word, scratch.keys.data() + ((i - group) / kPanel * words + word) * kPanel + i % kPanel);
                }
            for (int64_t part = 0; part < num_parts(rows); part++) {
                int64_t r = split(rows, part), together = split(rows, part + 1) - r;
                Target s{scratch.scores.data() + r * kChunk + group, kChunk, true, nullptr, nullptr, 0, end - group};
                Nothing nothing;
                multiply<4>(together, PlainRows{scratch.queries.data() + r * width, width},
                            packed_keys(scratch.keys.data(), words * kPanel, (T*)nullptr), width, (end - group) / kLanes, s, nothing);
            }
        }
        bool few = num_parts(rows) == 1;
        int64_t asks = few ? (width / kLanes + 5) / 6 * ((count + kStride - 1) / kStride) : num_parts(rows);
        bool more = chunk + kChunk < piece.end;
        const Piece& after = more || !next ? piece : *next;
        int64_t from = more ? chunk + kChunk : next ? next->start : 0, to = more || next ? std::min(from + kChunk, after.end) : 0;
        Coming keys_come(slots_of(op.keys, op, pass, after, sizeof(T)), from, to, asks);
        for (int64_t part = 0; part < num_parts(rows); part++) {
            int64_t r = split(rows, part), together = split(rows, part + 1) - r;
            float* scores = scratch.scores.data() + r * kChunk;
            float* results = scratch.results.data() + r * width;
            for (int64_t m = 0; m < together; m++) {
                int64_t own = position[piece.first + (r + m) / sharing] - chunk;
                float kept = weigh(scores + m * kChunk, padded, own - window + 1, own, op.soft_cap, &scratch.maxima[r + m],
                                   &scratch.sums[r + m]);
                for (int64_t i = 0; i < width; i++) results[m * width + i] *= kept;
            }
            Target o{results, width, false, nullptr, nullptr, 0, width};
            if (few) {
                add_values(together, scores, values, count, width, o, keys_come);
            } else {
                Nothing nothing;
                keys_come.ask();
                add_values(together, scores, values, count, width, o, nothing);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        float *results = scratch.results.data() + r * width, *y = op.y + token * op.y_stride + head * width;
        for (int64_t i = 0; i < width; i++) results[i] /= scratch.sums[r];
        for (int64_t i = 0; i < width; i++) y[i] = results[place(width, (T*)nullptr, i)];
    }
}

// The pieces of a pass, in the order in which threads take them.
struct Pieces {
    const Op& op;
    const Pass& pass;
    int64_t tokens;  // of a piece, at most
    int64_t index = 0, sequence = 0, last = 0, head = 0;
    Pieces(const Op& o, const Pass& p) : op(o), pass(p), tokens(std::max<int64_t>(1, kRowsOfWork / (o.num_heads / o.num_kv_heads))) {
        last = length();
    }
    int64_t length() const { return pass.query_start[sequence + 1] - pass.query_start[sequence]; }
    // Piece number `number`, which is not before the one found last. False: there are not so many.
    bool find(int64_t number, Piece* piece) {
        // the last tokens first: they have the most to do, and the end should be even
        for (; index < number; index++) {
            if (++head < op.num_kv_heads) continue;
            head = 0;
            last -= tokens;
            if (last > 0) continue;
            if (++sequence == pass.num_sequences) return false;
            last = length();
        }
        const int64_t* position = pass.positions + pass.query_start[sequence];
        int64_t first = std::max<int64_t>(0, last - tokens), window = op.window ? op.window : position[last - 1] + 1;
        int64_t start = std::max<int64_t>(0, position[first] - window + 1) / kChunk * kChunk;
        *piece = {sequence, head, first, last, start, position[last - 1] + 1};
        return true;
    }
};

}  // namespace

void attend(const Op& op, const Pass& pass, const Worker& worker) {
    if (pass.num_sequences == 0) return;
    Pieces pieces(op, pass);
    Piece piece, next;
    bool more = pieces.find(worker.thread, &piece);
    while (more) {
        more = pieces.find(worker.num_threads + worker.next(), &next);
        if (op.stored == kBfloat16) attend_piece<bf16>(op, pass, piece, more ? &next : nullptr);
        else attend_piece<float>(op, pass, piece, more ? &next : nullptr);
        piece = next;
    }
}
