// How attention of a pass is divided into pieces, which threads take in turn. Used by both attention kernels (attention.cpp,
// attention_bf16.cpp).
//
// Usually a piece is a few tokens of one sequence and some heads. Where sequences share a prefix (shared_prefixes.h), its chunks
// come first, in pieces of one token each of many sequences ("cascade attention"); what they have then is kept, and pieces
// of each sequence go on from there.
//
// What must always hold: chunks of keys are on a grid over absolute positions, and each row sees its own in ascending order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../program.h"
#include "shared_prefixes.h"

namespace {

constexpr int64_t kPiecesPerThread = 4;  // at least, if several heads make one piece

// Some tokens and adjacent key/value heads.
struct Piece {
    int64_t sequence, head, num_heads;  // the tokens see the blocks of this sequence
    int64_t first, last;                // tokens first..last (exclusive), or those of SharedPrefixes::tokens
    int64_t start, end;                 // positions that they see; `start` is the beginning of a chunk
    const SharedPrefixes* shared = nullptr;  // null, unless the piece begins with, or leaves, the state of its rows there
    bool resumes = false;   // begins with it
    bool continues = false; // leaves it
    int64_t num_tokens() const { return last - first; }
    int64_t token(int64_t i) const { return continues ? shared->tokens[first + i] : first + i; }
    // The state of a row: its results, and after them its maximum and its sum.
    float* state(const Op& op, int64_t token, int64_t head) const {
        return shared->state(shared->index[token]) + head * state_floats(op.width);
    }
};

// The first position that the token at this one sees.
int64_t first_seen(const Op& op, int64_t position) {
    if (!op.window) return 0;
    return op.in_chunks ? position / op.window * op.window : std::max<int64_t>(0, position - op.window + 1);
}

// Whether any result of a piece is needed.
bool is_needed(const Op& op, const Pass& pass, const Piece& piece) {
    return !op.on_logits_rows || piece.continues || any_drawn(pass, piece.first, piece.last);
}

// Begins a row, as if it had seen its head's sink, which has no value; or goes on where a piece before has left it.
void load_state(const Op& op, const Piece& piece, int64_t token, int64_t head, float* results, int64_t width, float* maximum, float* sum) {
    if (!piece.resumes) {
        std::fill_n(results, width, 0.0f);
        *maximum = op.bias ? op.bias[head] : -INFINITY;
        *sum = op.bias ? 1 : 0;
        return;
    }
    const float* state = piece.state(op, token, head);
    memcpy(results, state, width * sizeof(float));
    *maximum = state[width];
    *sum = state[width + 1];
}
void keep_state(const Op& op, const Piece& piece, int64_t token, int64_t head, const float* results, int64_t width, float maximum, float sum) {
    float* state = piece.state(op, token, head);
    memcpy(state, results, width * sizeof(float));
    state[width] = maximum;
    state[width + 1] = sum;
}

// Returns the tokens of a piece of at most `rows` query rows.
int64_t tokens_per_piece(const Op& op, int64_t rows) { return std::max<int64_t>(1, rows * op.num_kv_heads / op.num_heads); }

// The pieces over shared chunks. An item is a list of pieces, in order, with one key/value head; threads take items.
class SharedPieces {
public:
    // `rows`: query rows per piece, at most.
    SharedPieces(const Op& op, const SharedPrefixes& shared, int64_t rows, int64_t num_threads)
        : shared_(shared), num_heads_(op.num_kv_heads), done_(shared.tokens.size(), 0) {
        if (op.window || !shared.any()) return;  // windows end at other positions for each sequence
        int64_t sharing = op.num_heads / op.num_kv_heads, count = shared.tokens.size(), most = tokens_per_piece(op, rows);
        int64_t wanted = kPiecesPerThread * num_threads / op.num_kv_heads;  // parts of the pass
        most = std::min(most, std::max({count / std::max<int64_t>(1, wanted), (kFewestRows + sharing - 1) / sharing, int64_t{2}}));
        for (int64_t first = 0, last; first < count; first = last) {
            for (last = first + 1; last < count && shared.common[last - 1] > 0;) last++;
            int64_t parts = (last - first + most - 1) / most;
            for (int64_t i = 0; i < parts; i++) {
                starts_.push_back(pieces_.size());
                add(first + (last - first) * i / parts, first + (last - first) * (i + 1) / parts, 0);
            }
        }
        starts_.push_back(pieces_.size());
    }
    // Calls go(piece, next) for each piece that this thread takes, and waits until all have been processed.
    template <class F>
    void take(const Worker& worker, F go) const {
        if (pieces_.empty()) return;
        int64_t items = (starts_.size() - 1) * num_heads_;
        for (int64_t item = worker.thread; item < items; item = worker.num_threads + worker.next()) {
            int64_t first = starts_[item / num_heads_], last = starts_[item / num_heads_ + 1];
            for (int64_t i = first; i < last; i++) {
                Piece piece = pieces_[i], next = pieces_[std::min(i + 1, last - 1)];
                piece.head = next.head = item % num_heads_;
                go(piece, i + 1 < last ? &next : nullptr);
            }
        }
        worker.wait();
    }
    // How many positions of a token's sequence, from the first on, these pieces process.
    int64_t positions_done(int64_t token) const {
        int64_t i = shared_.any() ? shared_.index[token] : -1;
        return i < 0 ? 0 : done_[i];
    }

private:
    static constexpr int64_t kFewestRows = 16;  // of a piece, if there are as many: fewer would not use what they read

    // Adds the pieces of tokens first..last (exclusive) from chunk `c` on: first what all have in common, then what some have.
    void add(int64_t first, int64_t last, int64_t c) {
        if (last - first < 2) return;
        int64_t all = *std::min_element(shared_.common.begin() + first, shared_.common.begin() + last - 1);
        if (all > c) {
            pieces_.push_back({shared_.sequences[first], 0, 1, first, last, c * kChunk, all * kChunk, &shared_, c > 0, true});
            std::fill(done_.begin() + first, done_.begin() + last, all * kChunk);
        }
        for (int64_t i = first, end; i < last; i = end) {
            for (end = i + 1; end < last && shared_.common[end - 1] > all;) end++;
            add(i, end, std::max(c, all));
        }
    }

    const SharedPrefixes& shared_;
    int64_t num_heads_;
    std::vector<Piece> pieces_;
    std::vector<int64_t> starts_;  // the first piece of each part, and the end of the last
    std::vector<int64_t> done_;    // of each of SharedPrefixes::tokens
};

// Whether each head of each sequence is one piece. Then only the piece's own thread reads what it writes to the cache.
bool one_piece_per_head(const Op& op, const Pass& pass, int64_t rows) {
    int64_t tokens = tokens_per_piece(op, rows);
    for (int64_t i = 0; i < pass.num_sequences; i++)
        if (pass.query_start[i + 1] - pass.query_start[i] > tokens) return false;
    return true;
}

// The pieces of each sequence, in the order in which threads take them.
struct Pieces {
    const Op& op;
    const Pass& pass;
    const SharedPrefixes& shared;
    const SharedPieces& done;
    int64_t sharing, tokens;     // query heads per key/value head; tokens per piece, at most
    int64_t few_rows, together;  // sequences of at most `few_rows` rows per head have pieces of `together` heads
    int64_t index = 0, sequence = 0, last = 0, head = 0;
    Pieces(const Op& o, const Pass& p, const SharedPrefixes& s, const SharedPieces& d, int64_t rows, int64_t few, int64_t num_threads)
        : op(o), pass(p), shared(s), done(d), sharing(o.num_heads / o.num_kv_heads), tokens(tokens_per_piece(o, rows)),
          few_rows(few), together(heads_together(num_threads)) {
        last = length();
    }
    // As many heads as leave enough pieces for threads to finish together.
    int64_t heads_together(int64_t num_threads) const {
        int64_t heads = op.num_kv_heads;
        for (; heads > 1; heads = (heads + 1) / 2) {
            int64_t count = pass.num_sequences * ((op.num_kv_heads + heads - 1) / heads);
            if (count >= kPiecesPerThread * num_threads || (pass.num_sequences == 1 && count % num_threads == 0)) break;
        }
        return heads;
    }
    int64_t length() const { return pass.query_start[sequence + 1] - pass.query_start[sequence]; }
    bool has_few_rows() const { return length() * sharing <= few_rows; }
    // Finds piece `number`, which must not be before the last one found. Returns false if there are fewer.
    bool find(int64_t number, Piece* piece) {
        // the last tokens first: they have the most work, and threads should finish together
        for (; index < number; index++) {
            head += has_few_rows() ? together : 1;
            if (head < op.num_kv_heads) continue;
            head = 0;
            last -= tokens;
            if (last > 0) continue;
            if (++sequence == pass.num_sequences) return false;
            last = length();
        }
        const int64_t* position = pass.positions + pass.query_start[sequence];
        int64_t heads = has_few_rows() ? std::min(together, op.num_kv_heads - head) : 1;
        int64_t first = std::max<int64_t>(0, last - tokens);
        int64_t start = first_seen(op, position[first]) / kChunk * kChunk;
        int64_t begin = pass.query_start[sequence], shared_end = done.positions_done(begin + first);
        *piece = {sequence, head, heads, begin + first, begin + last, std::max(start, shared_end), position[last - 1] + 1};
        if (shared_end) piece->shared = &shared, piece->resumes = true;
        return true;
    }
};

}  // namespace
