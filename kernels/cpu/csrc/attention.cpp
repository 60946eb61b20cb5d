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

constexpr int64_t kTogether = 32;    // keys that are multiplied while the next ones come from memory

struct Piece {
    int64_t sequence, head, first, last;  // tokens first..last (exclusive), counted from the sequence's first in the pass
};

// Ask for a row of so many 32-bit words, as far as the second-level cache: the first has too few places to wait in.
void fetch(const void* row, int64_t words) {
    for (int64_t i = 0; i < words; i += 16) _mm_prefetch(static_cast<const char*>(row) + i * 4, _MM_HINT_T1);
}

constexpr int64_t kTurned = 8;

// 8 keys x 8 words into 8 words x 8 keys of a panel.
void transpose(const uint32_t* const* rows, int64_t word, uint32_t* to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + word));
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + i * kPanel), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * kPanel), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
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

template <class T>
void attend_piece(const Op& op, const Pass& pass, const Piece& piece) {
    static thread_local Scratch scratch;
    int64_t width = op.width, sharing = op.num_heads / op.num_kv_heads, rows = (piece.last - piece.first) * sharing;
    int64_t words = width * static_cast<int64_t>(sizeof(T)) / 4;
    scratch.fit(rows, width);
    int64_t begin = pass.query_start[piece.sequence];
    const int64_t* position = pass.positions + begin;
    const int64_t* table = pass.tables + pass.table_start[piece.sequence];

    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        for (int64_t i = 0; i < width; i++)
            scratch.queries[r * width + i] = op.x[token * op.x_stride + head * width + i] * op.scale;
        scratch.maxima[r] = -INFINITY;
        scratch.sums[r] = 0;
    }
    std::fill_n(scratch.results.begin(), rows * width, 0.0f);

    int64_t context = position[piece.last - 1] + 1;
    int64_t window = op.window ? op.window : context;
    int64_t start = std::max<int64_t>(0, position[piece.first] - window + 1) / kChunk * kChunk;
    for (int64_t chunk = start; chunk < context; chunk += kChunk) {
        int64_t count = std::min(kChunk, context - chunk), padded = (count + kPanel - 1) / kPanel * kPanel;
        const T* values[kChunk];
        const uint32_t* keys[kChunk];
        int64_t block = chunk / pass.block_size, slot = chunk % pass.block_size;
        for (int64_t i = 0; i < padded; i++) {
            if (i < count) {
                int64_t at = ((table[block] * op.num_kv_heads + piece.head) * pass.block_size + slot) * width;
                keys[i] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(op.keys) + at);
                values[i] = static_cast<const T*>(op.values) + at;
                if (++slot == pass.block_size) slot = 0, block++;
            } else {
                keys[i] = scratch.zeros.data();
            }
        }
        // Some keys at a time, so that reading memory and multiplying overlap.
        for (int64_t group = 0; group < padded; group += kTogether) {
            int64_t end = std::min(group + kTogether, padded);
            for (int64_t i = group; i < end; i += kTurned) {
                // blocks lie anywhere: no hardware guesses where the next one begins
                for (int64_t j = i + kTogether; j < std::min(i + kTogether + kTurned, count); j++) fetch(keys[j], words);
                for (int64_t j = i; j < std::min(i + kTurned, count); j++) fetch(values[j], words);
                for (int64_t word = 0; word < words; word += kTurned)
                    transpose(keys + i, word, scratch.keys.data() + ((i - group) / kPanel * words + word) * kPanel + i % kPanel);
            }
            for (int64_t r = 0; r < rows; r += kMaxRows) {
                Target s{scratch.scores.data() + r * kChunk + group, kChunk, true, nullptr, nullptr, 0, end - group};
                multiply(std::min<int64_t>(kMaxRows, rows - r), PlainRows{scratch.queries.data() + r * width, width},
                         packed_keys(scratch.keys.data(), words * kPanel, (T*)nullptr), width, (end - group) / kLanes, s);
            }
        }
        for (int64_t r = 0; r < rows; r += kMaxRows) {
            int64_t together = std::min<int64_t>(kMaxRows, rows - r);
            float* scores = scratch.scores.data() + r * kChunk;
            float* results = scratch.results.data() + r * width;
            for (int64_t m = 0; m < together; m++) {
                int64_t own = position[piece.first + (r + m) / sharing] - chunk;
                float kept = weigh(scores + m * kChunk, padded, own - window + 1, own, op.soft_cap, &scratch.maxima[r + m],
                                   &scratch.sums[r + m]);
                for (int64_t i = 0; i < width; i++) results[m * width + i] *= kept;
            }
            Target o{results, width, false, nullptr, nullptr, 0, width};
            multiply(together, PlainRows{scores, kChunk}, Rows<T>{values, 0}, count, width / kLanes, o);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        for (int64_t i = 0; i < width; i++)
            op.y[token * op.y_stride + head * width + i] = scratch.results[r * width + i] / scratch.sums[r];
    }
}

}  // namespace

void attend(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t tokens = std::max<int64_t>(1, kRowsOfWork / (op.num_heads / op.num_kv_heads));
    int64_t taken = worker.next(), index = 0;
    for (int64_t sequence = 0; sequence < pass.num_sequences; sequence++) {
        int64_t length = pass.query_start[sequence + 1] - pass.query_start[sequence];
        // the last tokens first: they have the most to do, and the end should be even
        for (int64_t last = length; last > 0; last -= tokens)
            for (int64_t head = 0; head < op.num_kv_heads; head++, index++) {
                if (index != taken) continue;
                Piece piece{sequence, head, std::max<int64_t>(0, last - tokens), last};
                if (op.stored == kBfloat16) attend_piece<bf16>(op, pass, piece);
                else attend_piece<float>(op, pass, piece);
                taken = worker.next();
            }
    }
}
