// Sequences of a pass that hold the same physical blocks: a prefix that the prefix cache found for all of them. Attention then
// reads the blocks once for all (attention.h); without it, 32 streams of one system prompt would read it 32 times.
//
// Found once for a pass (run.cpp). Only sequences with one token in the pass are considered, since they are the ones that wait
// for memory. Blocks are compared, all of them: nothing is assumed about who allocated them.
//
// What must always hold: the bits are those of the sequence alone. A row's chunks of keys are on a grid over absolute positions,
// in order, each for itself, so it does not matter with which other rows a chunk is multiplied.
#pragma once
#include <vector>

#include "../vec/buffer.h"
#include "../program.h"

constexpr int64_t kChunk = 256;  // keys that attention processes at a time

// The numbers that attention keeps of a row, whose results have `width` elements, padded as the kernels need it.
inline int64_t state_floats(int64_t width) { return (width + 31) / 32 * 32 + 16; }

struct SharedPrefixes {
    // Tokens that share a chunk with another one; those that share the most are adjacent.
    std::vector<int64_t> tokens;
    // How many chunks, from the first on, each has in common with the next; 0 for the last.
    std::vector<int64_t> common;
    // The index in `tokens` of each token of the pass, or -1.
    std::vector<int64_t> index;
    // The sequence of each of `tokens`.
    std::vector<int64_t> sequences;

    bool any() const { return !tokens.empty(); }
    void find(const Pass& pass);

    // What attention keeps of a row from its shared chunks to the others: results, maximum and sum. `floats` of them for each of
    // `tokens`.
    float* state(int64_t i) const { return states + i * floats; }
    void make_room(const Op* ops, int64_t num_ops);

private:
    float* states = nullptr;
    int64_t floats = 0;
};
