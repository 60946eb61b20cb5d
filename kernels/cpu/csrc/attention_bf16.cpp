// Attention over a bfloat16 or an 8-bit cache for processors with bfloat16 products (AVX-512 BF16, AMX): as in attention.cpp,
// but queries and weights are rounded to bfloat16 and both products are on pairs. Sums and the softmax are float32. The
// integers of an 8-bit cache are exact in bfloat16; weights are rounded after they have been multiplied with the values' scales.
//
// What must always hold: as in attention.cpp. In addition, results are never denormal between chunks: the products treat
// denormals as 0, so a chunk that adds nothing to a row would otherwise change it.
#include "program.h"
#include "vec.h"

#ifdef QUIPU_PAIRS
#include <cfloat>
#include <vector>

#include "attention.h"
#include "pairs_in_place.h"

namespace {

constexpr int64_t kRowsPerPiece = 128;  // query rows per piece: each chunk is packed once for all of them

static_assert(kChunk % kPairStep == 0 && kPanel % kPairStep == 0);

// Buffers that a thread keeps between passes.
struct Scratch {
    std::vector<bf16> queries, weights, values;
    std::vector<float> scores, results, maxima, sums, scales;
    std::vector<uint32_t> keys, zeros;
    template <class T>
    static void fit(std::vector<T>& v, int64_t size) {
        if (static_cast<int64_t>(v.size()) < size) v.resize(size);
    }
    void fit(int64_t rows, int64_t width, int64_t padded_width) {
        fit(queries, rows * padded_width);
        fit(weights, rows * kChunk);
        fit(values, kChunk * padded_width);
        fit(scores, rows * kChunk);
        fit(results, rows * padded_width);
        fit(maxima, rows);
        fit(sums, rows);
        fit(scales, 2 * kChunk);
        fit(keys, kChunk * width / 2);
        fit(zeros, width / 2);
    }
};

// Interleaves two rows of values as pairs, into row `k` of each panel of columns; panels are `panel_stride` apart.
void interleave(const bf16* even, const bf16* odd, int64_t width, int64_t k, int64_t panel_stride, bf16* to) {
    for (int64_t column = 0; column < width; column += 8) {
        __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even + column));
        __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + column));
        __m128i* at = reinterpret_cast<__m128i*>(to + column / kPanel * panel_stride + k * kPanel + column % kPanel * 2);
        _mm_storeu_si128(at, _mm_unpacklo_epi16(a, b));
        _mm_storeu_si128(at + 1, _mm_unpackhi_epi16(a, b));
    }
}

void interleave(const int8_t* even, const int8_t* odd, int64_t width, int64_t k, int64_t panel_stride, bf16* to) {
    for (int64_t column = 0; column < width; column += kLanes)
        _mm512_storeu_si512(to + column / kPanel * panel_stride + k * kPanel + column % kPanel * 2,
                            interleaved(even + column, odd + column));
}

// Writes keys i .. i + step, and words word .. word + kTranspose of each, to the packed keys of a chunk. `panel` has those of
// blocks that store them transposed, where step is kSlots; else it is null, and `keys` has a row for each.
void pack_keys(const bf16* panel, const bf16* const* keys, int64_t i, int64_t word, int64_t words, uint32_t* packed) {
    uint32_t* to = packed + (i / kPanel * words + word) * kPanel + i % kPanel;
    if (!panel) return transpose(reinterpret_cast<const uint32_t* const*>(keys + i), word, to);
    for (int64_t w = 0; w < kTranspose; w++) memcpy(to + w * kPanel, panel + (word + w) * kSlots * 2, kSlots * sizeof(uint32_t));
}
void pack_keys(const int8_t* panel, const int8_t* const* keys, int64_t i, int64_t word, int64_t words, uint32_t* packed) {
    int8_t transposed[2 * kTranspose * kSlots];
    if (panel) panel += word * 2 * kSlots;
    else transpose(keys + i, word * 2, transposed), panel = transposed;
    uint32_t* to = packed + (i / kPanel * words + word) * kPanel + i % kPanel;
    for (int64_t w = 0; w < kTranspose; w++) 
        _mm512_storeu_si512(to + w * kPanel, interleaved(panel + 2 * w * kSlots, panel + (2 * w + 1) * kSlots));
}

// Rescales the results of earlier chunks to this chunk's maximum.
void rescale(float* results, int64_t width, float kept) {
    for (int64_t i = 0; i < width; i += kLanes) {
        Vec y = load(results + i) * splat(kept);
        store(results + i, zero_where_below(larger(y, splat(0) - y), FLT_MIN, y));
    }
}

// `next` is this thread's next piece, or null: its keys are prefetched.
template <class T>
void attend_piece(const Op& op, const Pass& pass, const Piece& piece, const Piece* next, Pairs& pairs) {
    constexpr bool kScaled = sizeof(T) == 1;
    static thread_local Scratch scratch;
    int64_t width = op.width, padded_width = padded_depth(width), words = width / 2;
    int64_t sharing = op.num_heads / op.num_kv_heads, rows = (piece.last - piece.first) * sharing;
    scratch.fit(rows, width, padded_width);
    int64_t begin = pass.query_start[piece.sequence];
    const int64_t* position = pass.positions + begin;
    Slots key_slots = slots_of(op.keys, op, pass, piece, sizeof(T)), value_slots = slots_of(op.values, op, pass, piece, sizeof(T));
    const T* zeros = reinterpret_cast<const T*>(scratch.zeros.data());

    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        const float* query = op.x + token * op.x_stride + head * width;
        bf16* to = scratch.queries.data() + r * padded_width;
        for (int64_t i = 0; i < width; i++) narrow(query[i] * op.scale, to + i);
        std::fill(to + width, to + padded_width, 0);
        scratch.maxima[r] = -INFINITY;
        scratch.sums[r] = 0;
    }
    std::fill_n(scratch.results.begin(), rows * padded_width, 0.0f);

    int64_t window = op.window ? op.window : piece.end;
    for (int64_t chunk = piece.start; chunk < piece.end; chunk += kChunk) {
        int64_t count = std::min(kChunk, piece.end - chunk), padded = (count + kPanel - 1) / kPanel * kPanel;
        const T *values[kChunk], *keys[kChunk];
        for (int64_t i = 0, block = chunk / pass.block_size, slot = chunk % pass.block_size; i < count; block++, slot = 0) {
            const char *key = key_slots.at(block, slot), *value = value_slots.at(block, slot);
            for (int64_t end = std::min(count, i + pass.block_size - slot); i < end; i++) {
                keys[i] = reinterpret_cast<const T*>(key);
                values[i] = reinterpret_cast<const T*>(value);
                key += key_slots.slot_bytes;
                value += value_slots.slot_bytes;
            }
        }
        for (int64_t i = count; i < padded; i++) {
            keys[i] = zeros;
            values[i] = zeros;
        }
        float *key_scales = scratch.scales.data(), *value_scales = key_scales + kChunk;
        if (kScaled) {
            key_slots.scales(chunk, count, padded, key_scales);
            value_slots.scales(chunk, count, padded, value_scales);
        }
        // Values are prefetched while keys are read, and the next keys while values are.
        bool transposed = keys_are_transposed(pass.block_size);
        int64_t step = transposed || kScaled ? kSlots : kTranspose;
        bool in_place = transposed && rows <= kRowsInPlace;
        SlotPrefetch value_prefetch(value_slots, chunk, chunk + count,
                                    in_place ? calls_in_place(rows, padded / kSlots, words) : padded / step * (words / kTranspose));
        const T* panels[kChunk / kSlots];
        for (int64_t i = 0; i < padded && transposed; i += kSlots)
            panels[i / kSlots] = reinterpret_cast<const T*>(key_slots.panel(i < count ? chunk + i : chunk));
        if (in_place)
            add_keys_in_place(scratch.queries.data(), padded_width, rows, panels, padded / kSlots, width, scratch.scores.data(),
                              value_prefetch);
        for (int64_t i = 0; i < padded && !in_place; i += step) {
            const T* panel = transposed ? panels[i / kSlots] : nullptr;
            for (int64_t word = 0; word < words; word += kTranspose) {
                value_prefetch.advance();
                pack_keys(panel, keys, i, word, words, scratch.keys.data());
            }
        }
        for (int64_t i = 0; i < padded && !in_place; i += kPanel)
            pairs.add(scratch.queries.data(), padded_width, rows, reinterpret_cast<const bf16*>(scratch.keys.data() + i * words), width,
                      true, scratch.scores.data() + i, kChunk);

        for (int64_t r = 0; r < rows; r++) {
            int64_t own = position[piece.first + r / sharing] - chunk;
            float* scores = scratch.scores.data() + r * kChunk;
            if (kScaled) scale_row(scores, key_scales, padded);
            float kept = softmax_chunk(scores, padded, own - window + 1, own, op.soft_cap, &scratch.maxima[r], &scratch.sums[r]);
            rescale(scratch.results.data() + r * padded_width, padded_width, kept);
            if (kScaled) scale_row(scores, value_scales, padded);
            for (int64_t i = 0; i < padded; i++) narrow(scores[i], scratch.weights.data() + r * kChunk + i);
        }

        bool more = chunk + kChunk < piece.end;
        const Piece& after = more || !next ? piece : *next;
        int64_t from = more ? chunk + kChunk : next ? next->start : 0, to = more || next ? std::min(from + kChunk, after.end) : 0;
        SlotPrefetch key_prefetch(slots_of(op.keys, op, pass, after, sizeof(T)), from, whole_panels(to, pass),
                                  in_place ? calls_in_place(rows, width / kLanes, padded / 2) : padded / 2);
        if (in_place) {
            add_values_in_place(scratch.weights.data(), rows, values, padded, width, scratch.results.data(), padded_width,
                                key_prefetch);
            continue;
        }
        int64_t panel_stride = padded * kPanel;
        for (int64_t i = 0; i < padded; i += 2) {
            key_prefetch.advance();
            interleave(values[i], values[i + 1], width, i, panel_stride, scratch.values.data());
        }
        for (int64_t column = 0; column < width; column += kPanel)
            pairs.add(scratch.weights.data(), kChunk, rows, scratch.values.data() + column / kPanel * panel_stride, padded, false,
                      scratch.results.data() + column, padded_width);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = begin + piece.first + r / sharing, head = piece.head * sharing + r % sharing;
        float *results = scratch.results.data() + r * padded_width, *y = op.y + token * op.y_stride + head * width;
        for (int64_t i = 0; i < width; i++) y[i] = results[i] / scratch.sums[r];
    }
}

}  // namespace

void attend_bf16(const Op& op, const Pass& pass, const Worker& worker) {
    Pieces pieces(op, pass, kRowsPerPiece);
    Pairs pairs;
    Piece piece, next;
    bool more = pieces.find(worker.thread, &piece);
    while (more) {
        more = pieces.find(worker.num_threads + worker.next(), &next);
        if (op.stored == kInt8) attend_piece<int8_t>(op, pass, piece, more ? &next : nullptr, pairs);
        else attend_piece<bf16>(op, pass, piece, more ? &next : nullptr, pairs);
        piece = next;
    }
}
#endif
