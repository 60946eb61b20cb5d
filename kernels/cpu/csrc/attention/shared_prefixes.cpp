// See shared_prefixes.h.
#include "shared_prefixes.h"

#include <algorithm>
#include <cstring>

namespace {

struct Table {
    int64_t sequence, token;
    const int64_t* blocks;
    int64_t num_chunks;  // whole ones before the token
};

// The blocks of chunk `c`: from `first` to `last` (exclusive).
struct Range {
    int64_t first, last;
    Range(int64_t c, int64_t block_size) : first(c * kChunk / block_size), last(((c + 1) * kChunk - 1) / block_size + 1) {}
};

int64_t chunks_in_common(const Table& a, const Table& b, int64_t block_size) {
    int64_t most = std::min(a.num_chunks, b.num_chunks), c = 0;
    for (; c < most; c++) {
        Range range(c, block_size);
        if (memcmp(a.blocks + range.first, b.blocks + range.first, (range.last - range.first) * sizeof(int64_t))) break;
    }
    return c;
}

// Orders tables by the first chunk whose last block differs: in a prefix cache those before it differ, too, or are the same. All of
// them are compared later, but only between neighbours.
bool comes_before(const Table& a, const Table& b, int64_t block_size) {
    for (int64_t c = 0, most = std::min(a.num_chunks, b.num_chunks); c < most; c++) {
        int64_t at = Range(c, block_size).last - 1;
        if (a.blocks[at] != b.blocks[at]) return a.blocks[at] < b.blocks[at];
    }
    return a.num_chunks < b.num_chunks;
}

}  // namespace

void SharedPrefixes::find(const Pass& pass) {
    std::vector<Table> tables;
    for (int64_t i = 0; i < pass.num_sequences; i++) {
        int64_t token = pass.query_start[i], num_chunks = pass.positions[token] / kChunk;
        if (pass.query_start[i + 1] - token == 1 && num_chunks > 0)
            tables.push_back({i, token, pass.tables + pass.table_start[i], num_chunks});
    }
    std::stable_sort(tables.begin(), tables.end(),
                     [&](const Table& a, const Table& b) { return comes_before(a, b, pass.block_size); });
    int64_t before = 0;  // chunks in common with the table before
    for (size_t i = 0; i < tables.size(); i++) {
        int64_t after = i + 1 < tables.size() ? chunks_in_common(tables[i], tables[i + 1], pass.block_size) : 0;
        if (before || after) {
            if (index.empty()) index.assign(pass.num_tokens, -1);
            index[tables[i].token] = tokens.size();
            tokens.push_back(tables[i].token);
            sequences.push_back(tables[i].sequence);
            common.push_back(after);
        }
        before = after;
    }
}

void SharedPrefixes::make_room(const Op* ops, int64_t num_ops) {
    static thread_local Buffer<float> kept;
    for (int64_t i = 0; i < num_ops; i++)
        if (ops[i].kind == kAttend) floats = std::max(floats, ops[i].num_heads * state_floats(ops[i].width));
    if (kept.size() < tokens.size() * floats) kept.resize(tokens.size() * floats);
    states = kept.data();
}

// Lists what find() finds, for tests: tokens, and the chunks that each has in common with the next. Returns how many tokens.
extern "C" int64_t quipu_shared_prefixes(const Pass* pass, int64_t* tokens, int64_t* common) {
    SharedPrefixes found;
    found.find(*pass);
    std::copy(found.tokens.begin(), found.tokens.end(), tokens);
    std::copy(found.common.begin(), found.common.end(), common);
    return found.tokens.size();
}
