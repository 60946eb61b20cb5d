// The rows of a piece in the kernels that multiply bfloat16: queries, running softmax and results, of each head `rows` in
// turn. Shared by attention_bf16.cpp and attention_in_place.h.
#pragma once
#include <cfloat>

#include "../vec/buffer.h"
#include "rounded_weights.h"

namespace {

// Buffers that a thread keeps between passes.
struct Scratch {
    Buffer<bf16> queries, weights, values;
    Buffer<float> query, widened, scores, results, maxima, sums, scales;
    Buffer<uint32_t> keys, zeros;
    template <class T>
    static void fit(Buffer<T>& v, int64_t size) {
        if (static_cast<int64_t>(v.size()) < size) v.resize(size);
    }
    void fit(int64_t rows, int64_t width, int64_t padded_width, int64_t stride) {
        query.assign(padded_width, 0.0f);
        fit(queries, rows * stride);
        fit(weights, rows * kWeightStride);
        fit(values, kChunk * padded_width);
        fit(scores, rows * kScoreStride);
        fit(results, rows * stride);
        fit(maxima, rows);
        fit(sums, rows);
        fit(scales, 2 * kChunk);
        fit(keys, kChunk * width / 2);
        fit(zeros, width / 2);
    }
};

// Rescales the results of earlier chunks to this chunk's maximum.
void rescale(float* results, int64_t width, float kept) {
    for (int64_t i = 0; i < width; i += kLanes) {
        Vec y = load(results + i) * splat(kept);
        store(results + i, zero_where_below(larger(y, splat(0) - y), FLT_MIN, y));
    }
}

struct PieceRows {
    const Op& op;
    const Pass& pass;
    const Piece& piece;
    Scratch& scratch;
    int64_t sharing, rows;         // query heads per key/value head; rows of one of these
    int64_t padded_width, stride;  // of queries and results; from one row to the next, in elements
    PieceRows(const Op& o, const Pass& p, const Piece& i, Scratch& s)
        : op(o), pass(p), piece(i), scratch(s), sharing(o.num_heads / o.num_kv_heads), rows(i.num_tokens() * sharing),
          padded_width(padded_depth(o.width)), stride((padded_width / kPairStep | 1) * kPairStep) {
        scratch.fit(count(), op.width, padded_width, stride);
    }
    int64_t count() const { return rows * piece.num_heads; }
    int64_t token(int64_t r) const { return piece.token(r % rows / sharing); }
    int64_t head(int64_t r) const { return (piece.head + r / rows) * sharing + r % sharing; }
    bf16* queries(int64_t r) { return scratch.queries.data() + r * stride; }
    // All queries, as they are multiplied in place.
    const bf16* all_queries(const bf16*) { return scratch.queries.data(); }
    const float* all_queries(const float*) {
        Scratch::fit(scratch.widened, count() * stride);
        for (int64_t i = 0; i < count() * stride; i++) scratch.widened[i] = widen(scratch.queries[i]);
        return scratch.widened.data();
    }
    float* scores(int64_t r) { return scratch.scores.data() + r * kScoreStride; }
    bf16* weights(int64_t r) { return scratch.weights.data() + r * kWeightStride; }
    float* results(int64_t r) { return scratch.results.data() + r * stride; }

    void find_query_of(int64_t r) {
        if (op.x_rounded) {
            const bf16* query = reinterpret_cast<const bf16*>(op.x) + token(r) * op.x_stride + head(r) * op.width;
            memcpy(queries(r), query, op.width * sizeof(bf16));
            std::fill(queries(r) + op.width, queries(r) + padded_width, 0);
            return;
        }
        float* query = scratch.query.data();
        find_query(op, pass, token(r), head(r), query);
        for (int64_t i = 0; i < op.width; i++) query[i] *= op.scale;
        round_row(query, padded_width, queries(r));
    }
    void start() {
        for (int64_t r = 0; r < count(); r++) {
            find_query_of(r);
            load_state(op, piece, token(r), head(r), results(r), padded_width, &scratch.maxima[r], &scratch.sums[r]);
        }
    }
    // Converts the scores of a chunk to weights, for the rows of head `h` of the piece; in both, a row has whole panels.
    void weigh(int64_t h, int64_t chunk) {
        int64_t count = std::min(kChunk, piece.end - chunk), padded = (count + kPanel - 1) / kPanel * kPanel;
        bool scaled = op.stored == kInt8;
        float *key_scales = scratch.scales.data(), *value_scales = key_scales + kChunk;
        if (scaled) {
            slots_of(op.keys, op, pass, piece, 1, h).scales(chunk, count, padded, key_scales);
            slots_of(op.values, op, pass, piece, 1, h).scales(chunk, count, padded, value_scales);
        }
        auto row = [&](int64_t r) {
            int64_t position = pass.positions[token(r)];
            return ScoreRow(scores(r), padded, first_seen(op, position) - chunk, position - chunk);
        };
        constexpr int64_t kTogether = 4;  // rows: what finding a maximum waits for is hidden behind those of others
        for (int64_t r = h * rows, end = r + rows, last; r < end; r = last) {
            last = std::min(end, r + kTogether);
            float tops[kTogether];
            for (int64_t i = r; i < last; i++) {
                if (scaled) scale_row(scores(i), key_scales, padded);
                tops[i - r] = row(i).top(op.soft_cap, scratch.maxima[i]);
            }
            for (int64_t i = r; i < last; i++) weigh(i, row(i), tops[i - r], scaled ? value_scales : nullptr);
        }
    }
    void weigh(int64_t r, const ScoreRow& row, float top, const float* scales) {
        float &maximum = scratch.maxima[r], &sum = scratch.sums[r], added = row.weigh(top, scales, weights(r));
        if (top == maximum) {
            sum += added;
            return;
        }
        float kept = first_lane(exp_of_weight(splat(maximum - top)));
        rescale(results(r), padded_width, kept);
        sum = sum * kept + added;
        maximum = top;
    }
    void finish() {
        for (int64_t r = 0; r < count(); r++) {
            if (piece.continues) {
                keep_state(op, piece, token(r), head(r), results(r), padded_width, scratch.maxima[r], scratch.sums[r]);
                continue;
            }
            int64_t at = token(r) * op.y_stride + head(r) * op.width;
            float *y = op.y_rounded ? results(r) : op.y + at, inverse = 1.0f / scratch.sums[r];
            // + 0: whether a sum is -0 or 0 depends on how many zeros follow the last value
            for (int64_t i = 0; i < op.width; i++) y[i] = (results(r)[i] + 0.0f) * inverse;
            if (op.y_rounded) round_row(y, op.width, reinterpret_cast<bf16*>(op.y) + at);
        }
    }
};

}  // namespace
