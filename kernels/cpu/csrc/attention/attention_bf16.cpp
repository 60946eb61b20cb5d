// Attention over a bfloat16 or an 8-bit cache for processors with bfloat16 products (AVX-512 BF16, AMX): as in attention.cpp,
// but queries and weights are rounded to bfloat16 and both products are on pairs. Sums and the softmax are float32. The
// integers of an 8-bit cache are exact in bfloat16; weights are rounded after they have been multiplied with the values' scales.
//
// What must always hold: as in attention.cpp. In addition, results are never denormal between chunks: the products treat
// denormals as 0, so a chunk that adds nothing to a row would otherwise change it.
#include "../program.h"
#include "../vec/vec.h"

#ifdef QUIPU_PAIRS
#include "attention_in_place.h"

namespace {

constexpr int64_t kRowsPerPiece = 128;  // query rows per piece: each chunk is packed once for all of them
constexpr int64_t kParts = 4;           // of those rows, between which values are prefetched

static_assert(kChunk % kPairStep == 0 && kPanel % kPairStep == 0);

// Interleaves two rows of values as pairs, into row `k` of each panel of columns; panels are `panel_stride` apart.
template <class T>
void interleave(const T* even, const T* odd, int64_t width, int64_t k, int64_t panel_stride, bf16* to) {
    for (int64_t column = 0; column < width; column += kLanes)
        _mm512_storeu_si512(to + column / kPanel * panel_stride + k * kPanel + column % kPanel * 2,
                            interleaved(even + column, odd + column));
}

// Writes keys i .. i + step, and words word .. word + kTranspose of each, to the packed keys of a chunk. `panel` has those of
// blocks that store them transposed (in bfloat16 none: they are multiplied in place); else it is null, and `keys` has rows.
void pack_keys(const bf16*, const bf16* const* keys, int64_t i, int64_t word, int64_t words, uint32_t* packed) {
    uint32_t* to = packed + (i / kPanel * words + word) * kPanel + i % kPanel;
    transpose(reinterpret_cast<const uint32_t* const*>(keys + i), word, to, kPanel);
}
void pack_keys(const int8_t* panel, const int8_t* const* keys, int64_t i, int64_t word, int64_t words, uint32_t* packed) {
    int8_t transposed[2 * kTranspose * kSlots];
    if (panel) panel += word * 2 * kSlots;
    else transpose(keys + i, word * 2, transposed), panel = transposed;
    uint32_t* to = packed + (i / kPanel * words + word) * kPanel + i % kPanel;
    for (int64_t w = 0; w < kTranspose; w++)
        _mm512_storeu_si512(to + w * kPanel, interleaved(panel + 2 * w * kSlots, panel + (2 * w + 1) * kSlots));
}

// Packs the keys of a chunk, and prefetches its values meanwhile.
template <class T>
void pack_keys(const Slots& slots, bool transposed, const T* const* keys, int64_t chunk, int64_t count, int64_t words, const Slots& values,
               uint32_t* packed) {
    int64_t step = sizeof(T) == 1 ? kSlots : kTranspose, padded = (count + kPanel - 1) / kPanel * kPanel;
    SlotPrefetch value_prefetch(values, chunk, chunk + count, padded / step * (words / kTranspose));
    for (int64_t i = 0; i < padded; i += step) {
        const T* panel = transposed ? reinterpret_cast<const T*>(slots.panel(i < count ? chunk + i : chunk)) : nullptr;
        for (int64_t word = 0; word < words; word += kTranspose) {
            value_prefetch.advance();
            pack_keys(panel, keys, i, word, words, packed);
        }
    }
}

// Two panels of keys where they are in the cache; past `end` any, since results of unwritten keys are ignored.
Halves<2 * kSlots> keys_in_place(const Slots& slots, int64_t position, int64_t end) {
    auto half = [&](int64_t at) { return reinterpret_cast<const bf16*>(slots.panel(at < end ? at : position)); };
    return {half(position), half(position + kSlots)};
}

// `next` is this thread's next piece, or null: its keys are prefetched.
template <class T>
void attend_piece(const Op& op, const Pass& pass, const Piece& piece, const Piece* next, Pairs& pairs) {
    if (!is_needed(op, pass, piece)) return;
    constexpr bool kScaled = sizeof(T) == 1;
    static thread_local Scratch scratch;
    PieceRows all(op, pass, piece, scratch);
    all.start();
    int64_t width = op.width, words = width / 2, rows = all.rows;
    Slots key_slots = slots_of(op.keys, op, pass, piece, sizeof(T)), value_slots = slots_of(op.values, op, pass, piece, sizeof(T));
    const T* zeros = reinterpret_cast<const T*>(scratch.zeros.data());

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
        // Values are prefetched while keys are packed or multiplied, and the next keys while values are packed.
        bool transposed = keys_are_transposed(op, pass), in_place = !kScaled && transposed;
        if (!in_place) pack_keys(key_slots, transposed, keys, chunk, count, words, value_slots, scratch.keys.data());
        SlotPrefetch value_prefetch(value_slots, chunk, in_place ? chunk + count : chunk, padded / kPanel * kParts);
        for (int64_t i = 0; i < padded; i += kPanel) {
            for (int64_t part = 0; part < kParts; part++) {
                int64_t r = rows * part / kParts, some = rows * (part + 1) / kParts - r;
                value_prefetch.advance();
                auto add = [&](auto panel) { pairs.add(all.queries(r), all.stride, some, panel, width, true, all.scores(r) + i, kScoreStride); };
                if (in_place) add(keys_in_place(key_slots, chunk + i, chunk + count));
                else add(packed(reinterpret_cast<const bf16*>(scratch.keys.data() + i * words)));
            }
        }
        all.weigh(0, chunk);

        bool more = chunk + kChunk < piece.end;
        const Piece& after = more || !next ? piece : *next;
        int64_t from = more ? chunk + kChunk : next ? next->start : 0, to = more || next ? std::min(from + kChunk, after.end) : 0;
        SlotPrefetch key_prefetch(slots_of(op.keys, op, pass, after, sizeof(T)), from, whole_panels(to, op, pass), padded / 2);
        int64_t panel_stride = padded * kPanel;
        for (int64_t i = 0; i < padded; i += 2) {
            key_prefetch.advance();
            interleave(values[i], values[i + 1], width, i, panel_stride, scratch.values.data());
        }
        for (int64_t column = 0; column < width; column += kPanel)
            pairs.add(all.weights(0), kWeightStride, rows, packed(scratch.values.data() + column / kPanel * panel_stride), padded, false,
                      all.results(0) + column, all.stride);
    }
    all.finish();
}

template <class T>
void attend(const Op& op, const Pass& pass, const Worker& worker) {
    bool in_place = keys_are_transposed(op, pass);
    Pairs pairs;
    auto go = [&](const Piece& piece, const Piece* next, bool few) {
        if (few) attend_in_place<T>(op, pass, piece, next);
        else attend_piece<T>(op, pass, piece, next, pairs);
    };
    int64_t sharing = op.num_heads / op.num_kv_heads, few_rows = in_place ? kRowsInPlace : 0;
    SharedPieces shared(op, *worker.shared, kRowsPerPiece, worker.num_threads);
    shared.take(worker, [&](const Piece& piece, const Piece* after) { go(piece, after, piece.num_tokens() * sharing <= few_rows); });
    Pieces pieces(op, pass, *worker.shared, shared, kRowsPerPiece, few_rows, worker.num_threads);
    Worker second = worker.in_second_phase();
    Piece piece, next;
    bool more = pieces.find(worker.thread, &piece);
    while (more) {
        bool few = pieces.has_few_rows();
        more = pieces.find(worker.num_threads + second.next(), &next);
        go(piece, more ? &next : nullptr, few);
        piece = next;
    }
}

}  // namespace

void attend_bf16(const Op& op, const Pass& pass, const Worker& worker) {
    if (op.stored == kInt8) attend<int8_t>(op, pass, worker);
    else attend<bf16>(op, pass, worker);
}
#endif
