// A step: a list of `Op` over the columns of a `Pass`. Filled by ../program.py (whose fields must match, in order), run by
// run.cpp, with one kernel for each kind.
//
// What must always hold: row n of every result is a function of row n of the arguments (in attention, also of its own
// sequence's keys and values), with a fixed order of summation, whatever the number of rows, threads, blocks or chunks.
#pragma once
#include <algorithm>
#include <cstdint>

enum Kind : int32_t {
    kEmbed = 0,
    kGather = 1,
    kLinear = 2,
    kRmsNorm = 3,
    kRope = 4,
    kWriteKv = 5,
    kAttend = 6,
    kSiluMul = 7,
    kAdd = 8,
    kGeluMul = 9,
    kSoftCap = 10,
    kRoute = 11,
    kDispatch = 12,
    kExpertLinear = 13,
    kExpertSiluMul = 14,
    kCombine = 15,
    kLowRank = 16,
    kSigmoidMul = 17,
    kNormLatent = 18,
    kHeadLinear = 19,
    kLayerNorm = 20,
    kGelu = 21,
    kMul = 22,
    kSparseGeluMul = 23,
    kMatchCopies = 24,
    kMixCopies = 25,
};

// The dtype of a weight or a cache. kQuantized: the weight is a QuantizedMatrix (quantized.h).
enum Stored : int32_t { kFloat32 = 0, kBfloat16 = 1, kQuantized = 2, kInt8 = 3 };

// Activations are float32, but for those that are stored rounded, row-major; pointers are to row 0. An operation uses the fields that its kernel reads.
struct Op {
    int32_t kind;
    int32_t on_logits_rows;  // 1: runs on the rows whose logits are needed (Pass::num_logits), 0: on all tokens. attend writes all
                             // keys and values either way, and its results are in the rows of their tokens
    int32_t stored;          // dtype of `weight`, or of the cache; low_rank: kBfloat16 if x is to be rounded to it first
    int32_t no_barrier;      // 1: no barrier before the next operation
    int64_t width;      // elements of a row, or of a head, of x
    int64_t out_width;  // embed: rows of the table; mul without z: how many numbers `weight` has, one or width; linear, head_linear:
                        // columns of y; rope: how many elements of a head are rotated, from the first on;
                        // norm_latent: how many are normed
    int64_t num_heads;  // match_copies: copies in z; mix_copies: in x
    int64_t num_kv_heads;
    int64_t x_stride, y_stride, z_stride;
    int64_t window;     // attend: how many tokens a token sees, including itself; 0: all up to it. See in_chunks
    int64_t num_experts;
    int64_t num_chosen; // experts per token
    int64_t num_groups, num_chosen_groups;  // route: groups of experts, and how many of them may be chosen from
    int64_t first, num_multiplied;  // head_linear: the elements of a head that are multiplied; mix_copies: copies in z
    int64_t narrow_stride;  // linear: of v, if adapters change the product; mix_copies: of v
    int64_t drawn_columns;  // linear: so many columns, from the first on, are needed for tokens alone whose logits are needed
    float eps;          // of a norm; match_copies: the least mean square
    float scale;        // sparse_gelu_mul: deviations from the mean to the cutoff; factor of attention scores, of an embedding, or of the weights of experts; clamped_swiglu: of the gate in
                        // its sigmoid
    float soft_cap;     // c: x becomes c * tanh(x / c); 0: off. expert_silu_mul: c limits gate and up, else 0;
                        // route: the range of SparseMixer, else 0
    int32_t normalise;  // route: normalise the weights of the chosen experts to 1
    int32_t activation; // linear: apply silu_mul or gelu_mul (their kind) to the product of gate and up; 0: neither. route:
                        // sigmoid_mul, if weights are sigmoids; then `bias` may have a number for each expert. expert_silu_mul:
                        // gelu_mul for GELU. dispatch, combine: mul, if experts' rows are multiplied with their weights before
                        // the experts, rather than after them
    int32_t fused_rope; // attend: x and z are queries and keys before norm, rope and write_kv, which it does first
    int32_t x_rounded;  // linear, low_rank: x is bfloat16, x_stride of which are a row
    int32_t y_rounded;  // linear with an activation, attend: y is such
    int32_t interleaved;  // rope, attend with fused_rope: neighbours are rotated together, else elements half of out_width apart
    int32_t in_chunks;    // attend: a token sees its own chunk of `window` tokens, up to itself; they begin at multiples of it
    int32_t by_score;     // route: the largest scores are chosen, also if weights are their sigmoids
    const float* x;
    const float* z;  // second argument: the summand of linear, the values of write_kv; mul: null if `weight` is the one factor
    const void* weight;
    const float* bias;  // expert_linear: of each expert in turn; attend: the sink of each query head, or null
    const float* cos;
    const float* sin;
    float* y;
    void* keys;    // one layer's cache, [block, kv head, slot, head_dim]; see head_bytes
    void* values;  // may be the keys: then both are rows
    const void* const* matrices;  // one per expert, or per head; or one LowRank per adapter (linear/low_rank.cpp), null where it has none
    void* dispatch;               // the assignment of rows to experts; see experts.cpp
    const float* norm;      // linear, low_rank: norm x first, with this weight; attend with fused_rope: weight of the queries' norm;
                            // route: a factor of each expert's weight, or null
    const float* key_norm;  // attend with fused_rope: weight of the keys' norm
    const float* v;         // attend with fused_rope: values, in x's rows; linear: the result of low_rank, or null; mix_copies: a token's
                            // weights, or null, if `weight` has those of all
    float* scratch;         // memory for as many rows: linear's x after the norm
    float* raw;             // memory for as many rows: linear's y before the activation
    const struct Pass* pass;  // linear with v: of this step; set while it runs
    const Op* joined;         // linear: the attend with fused_rope that alone reads y, whose columns are the heads of queries, keys and
                              // values; attend: this linear. Or null. See heads_are_taken
};

// The columns of one pass; see StepBatch in ../../batch.py.
struct Pass {
    int64_t num_tokens;
    int64_t num_logits;
    int64_t num_sequences;
    int64_t block_size;
    int64_t num_threads;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* blocks;       // physical block to which each token's KV is written
    const int64_t* logits_indices;  // flat indexes of the tokens whose logits are needed; ascending, if any_drawn is asked
    const int64_t* query_start;  // first token of each sequence, and the end of the last
    const int64_t* tables;       // block tables, concatenated
    const int64_t* table_start;  // start of each table
    const int64_t* adapted_tokens;   // all tokens, sorted by adapter: first those without one
    const int64_t* adapted_starts;   // first of each adapter in adapted_tokens, and the end of the last
    const int64_t* adapted_logits;   // likewise, of the rows whose logits are needed
    const int64_t* adapted_logits_starts;
    int64_t num_adapters;
};

// One thread's share of an operation. `next` returns numbers from 0, each to one thread of the team.
struct Team;
struct SharedPrefixes;
struct Worker {
    int thread;
    int num_threads;
    int64_t* counter;
    Team* team;
    const SharedPrefixes* shared;  // of the pass
    int64_t next() const { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    void wait() const;  // barrier of all threads; team.cpp
    // Numbers from 0 once more.
    Worker in_second_phase() const { return {thread, num_threads, counter + kCounterStride, team, shared}; }
    static constexpr int64_t kCounterStride = 8;  // each counter is on its own cache line
    static constexpr int64_t kCounters = 2;       // of an operation
};

// A thread's share of the rows, which is the same in all row-wise operations.
struct Share {
    int64_t begin, end;
    Share(int64_t n, const Worker& w) : begin(n * w.thread / w.num_threads), end(n * (w.thread + 1) / w.num_threads) {}
};

// The offset of element `i` of a key within its block and head. Blocks of whole panels store keys transposed, as the product
// needs them: [panel][word][slot], where a word is one float32, two bfloat16 or one int8. Other blocks, and those whose keys are
// values, too, store rows.
constexpr int64_t kSlots = 16;
inline bool keys_are_transposed(const Op& op, const Pass& pass) { return pass.block_size % kSlots == 0 && op.keys != op.values; }
template <class T>
int64_t key_offset(bool is_transposed, int64_t width, int64_t slot, int64_t i) {
    constexpr int64_t in_word = sizeof(T) == 1 ? 1 : 4 / sizeof(T);
    if (!is_transposed) return slot * width + i;
    return slot / kSlots * kSlots * width + (i / in_word * kSlots + slot % kSlots) * in_word + i % in_word;
}

// Bytes of one head's keys, or values, in a block: its slots and, after those of an 8-bit cache, a float32 scale for each.
inline int64_t head_bytes(int32_t stored, int64_t block_size, int64_t width) {
    if (stored == kInt8) return block_size * (width + static_cast<int64_t>(sizeof(float)));
    return block_size * width * (stored == kBfloat16 ? 2 : 4);
}

// Up to this many rows, linear keeps a copy for each thread, if it keeps any; more rows are shared by all threads until the
// next barrier.
constexpr int64_t kOwnRows = 16;

// Whether the logits of any of these tokens are needed.
inline bool any_drawn(const Pass& pass, int64_t first, int64_t last) {
    const int64_t *end = pass.logits_indices + pass.num_logits, *found = std::lower_bound(pass.logits_indices, end, first);
    return found < end && *found < last;
}

// Whether linear must compute columns that end at `column`, for rows first..last (exclusive).
inline bool is_needed(const Op& op, const Pass& pass, int64_t first, int64_t last, int64_t column) {
    return column > op.drawn_columns || any_drawn(pass, first, last);
}

// Whether `product` itself gives its heads to the attention that reads them: it rotates queries, which it scales and stores rounded in
// y, and writes keys and values. The many rows of a prompt would else go through memory once more.
constexpr int64_t kKeptRows = 128;  // up to so many stay in the caches
inline bool heads_are_taken(const Op& product, const Op& attend, const Pass& pass) {
    bool pairs = product.stored != kFloat32 && attend.stored != kFloat32;
    return pairs && pass.num_tokens > kKeptRows && attend.width % 32 == 0;
}

inline int64_t num_rows(const Op& op, const Pass& pass) { return op.on_logits_rows ? pass.num_logits : pass.num_tokens; }

void embed(const Op&, const Pass&, const Worker&);
void gather(const Op&, const Pass&, const Worker&);
void linear(const Op&, const Pass&, const Worker&);
void linear_quantized(const Op&, const Pass&, const Worker&);  // parts of linear and embed
void linear_bytes(const Op&, const Pass&, const Worker&);
void embed_quantized(const Op&, int64_t token_id, float* y);
void rms_norm(const Op&, const Pass&, const Worker&);
void rope(const Op&, const Pass&, const Worker&);
void write_kv(const Op&, const Pass&, const Worker&);
void attend(const Op&, const Pass&, const Worker&);
void silu_mul(const Op&, const Pass&, const Worker&);
void add(const Op&, const Pass&, const Worker&);
void rotate_query(const Op&, const Pass&, int64_t token, int64_t head, float* to);  // parts of attend with fused_rope
void rotate_and_write(const Op&, const Pass&, int64_t token, int64_t kv_head);     // one key, and with it its value
void rotate_and_write(const Op&, const Pass&, const Worker&);                      // this thread's share of all
// A part of linear, for heads_are_taken: gives a head of `count` tokens from `token` on to attention, which changes x, where each token's
// is `width` after the one before. Heads are numbered across queries, keys and values.
void take_head(const Op& attend, const Pass&, int64_t token, int64_t count, int64_t head, float* x);
void gelu_mul(const Op&, const Pass&, const Worker&);
void soft_cap(const Op&, const Pass&, const Worker&);
void sigmoid_mul(const Op&, const Pass&, const Worker&);
void norm_latent(const Op&, const Pass&, const Worker&);
void head_linear(const Op&, const Pass&, const Worker&);
void layer_norm(const Op&, const Pass&, const Worker&);
void gelu(const Op&, const Pass&, const Worker&);
void mul(const Op&, const Pass&, const Worker&);
void sparse_gelu_mul(const Op&, const Pass&, const Worker&);
void match_copies(const Op&, const Pass&, const Worker&);
void mix_copies(const Op&, const Pass&, const Worker&);
void route(const Op&, const Pass&, const Worker&);
void dispatch(const Op&, const Pass&, const Worker&);
void expert_linear(const Op&, const Pass&, const Worker&);
void expert_silu_mul(const Op&, const Pass&, const Worker&);
void clamped_swiglu(const Op&, const Pass&, const Worker&);  // a part of expert_silu_mul
void combine(const Op&, const Pass&, const Worker&);
void low_rank(const Op&, const Pass&, const Worker&);
// Sums of some rows and panels: where the first row's of the first panel are, and how far apart rows and panels are.
struct SumsAt {
    float* p;
    int64_t row_stride, panel_stride;
};
void add_low_rank(const Op&, int64_t row, int64_t rows, int64_t panel, int64_t panels, SumsAt sums);  // a part of linear
