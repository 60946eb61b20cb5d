// What a step is: a list of `Op` over the columns of a `Pass`. Filled by ../program.py (the fields there must match,
// in order), run by run.cpp, one kernel a kind.
//
// What must always hold: row n of every result is a function of row n of the arguments (in attention: and of its own
// sequence's keys and values), in one order of summation, whatever the number of rows, threads, blocks or chunks.
#pragma once
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
    kDeal = 12,
    kExpertLinear = 13,
    kExpertSiluMul = 14,
    kMix = 15,
};

// How the numbers of a weight or a cache are stored.
enum Stored : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// Pointers to activations are to float32, row-major, at row 0. An operation uses the fields that its kernel names.
struct Op {
    int32_t kind;
    int32_t looked_at;  // 1: runs on the rows of the head (Pass::num_looked_at), 0: on all tokens
    int32_t stored;     // of `weight`, or of the cache
    int32_t joined;     // 1: a thread goes on to the next operation without waiting for the others
    int64_t width;      // elements of a row, or of a head, of x
    int64_t out_width;  // linear: columns of y; rope: elements of a head that are turned, the first ones
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t x_stride, y_stride, z_stride;
    int64_t window;     // attend: a token sees so many, itself among them; 0: all before it
    int64_t num_experts;
    int64_t num_chosen; // experts that a token goes to
    float eps;
    float scale;        // of attention's scores, or of an embedding
    float soft_cap;     // c: x becomes c * tanh(x / c); 0: it does not
    int32_t normalise;  // route: the weights of the chosen come to 1
    int32_t activation; // linear: y is gate and up no longer, but silu_mul's or gelu_mul's result (their kind); 0: neither
    int32_t turned;     // attend: x and z are queries and keys before norm, rope and write_kv, which it does first
    const float* x;
    const float* z;  // second argument: what linear adds, the values of write_kv
    const void* weight;
    const float* bias;
    const float* cos;
    const float* sin;
    float* y;
    void* keys;    // one layer's cache, [block, kv head, slot, head_dim]
    void* values;
    const void* const* matrices;  // one an expert
    void* deal;                   // which rows go to which expert; experts.cpp says how
    const float* norm;      // linear: x is rms_norm's argument, and this its weight; attend, turned: weights of the queries' norm
    const float* key_norm;  // attend, turned: and of the keys'
    const float* v;         // attend, turned: values, in x's rows
    float* room;            // for as many rows: of linear's x after the norm; of attend's queries
    float* raw;             // for as many rows: linear's y before the activation
};

// The columns of one pass; see StepBatch in ../../batch.py.
struct Pass {
    int64_t num_tokens;
    int64_t num_looked_at;
    int64_t num_sequences;
    int64_t block_size;
    int64_t num_threads;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* blocks;       // physical block that each token's KV goes to
    const int64_t* looked_at;    // flat indexes of the tokens whose logits are wanted
    const int64_t* query_start;  // of each sequence, one more than there are sequences
    const int64_t* tables;       // block tables, one behind the other
    const int64_t* table_start;  // where each begins
};

// One thread's share of an operation. `next` hands out numbers from 0, to all threads together.
struct Team;
struct Worker {
    int thread;
    int num_threads;
    int64_t* counter;
    Team* team;
    int64_t next() const { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    void wait() const;  // until all threads are here; team.cpp
};

// A thread's share of the rows, the same in each operation that works row by row.
struct Share {
    int64_t begin, end;
    Share(int64_t n, const Worker& w) : begin(n * w.thread / w.num_threads), end(n * (w.thread + 1) / w.num_threads) {}
};

// Where element `i` of a key goes, counted from its block's and head's first. Blocks of whole panels keep them turned, as
// their product wants them: [panel][word][slot], where a word is one float32 or two bfloat16. Others keep rows.
constexpr int64_t kSlots = 16;
inline bool keeps_turned(int64_t block_size) { return block_size % kSlots == 0; }
template <class T>
int64_t place_of_key(int64_t block_size, int64_t width, int64_t slot, int64_t i) {
    constexpr int64_t in_word = 4 / sizeof(T);
    if (!keeps_turned(block_size)) return slot * width + i;
    return slot / kSlots * kSlots * width + (i / in_word * kSlots + slot % kSlots) * in_word + i % in_word;
}

// So many rows linear keeps for each thread by itself, where it keeps any; more of them, where all threads read them until
// the next barrier.
constexpr int64_t kOwnRows = 16;

inline int64_t num_rows(const Op& op, const Pass& pass) { return op.looked_at ? pass.num_looked_at : pass.num_tokens; }

void embed(const Op&, const Pass&, const Worker&);
void gather(const Op&, const Pass&, const Worker&);
void linear(const Op&, const Pass&, const Worker&);
void rms_norm(const Op&, const Pass&, const Worker&);
void rope(const Op&, const Pass&, const Worker&);
void write_kv(const Op&, const Pass&, const Worker&);
void attend(const Op&, const Pass&, const Worker&);
void silu_mul(const Op&, const Pass&, const Worker&);
void add(const Op&, const Pass&, const Worker&);
void turn(const Op&, const Pass&, int64_t token, int64_t kv_head);  // a part of attend
void gelu_mul(const Op&, const Pass&, const Worker&);
void soft_cap(const Op&, const Pass&, const Worker&);
void route(const Op&, const Pass&, const Worker&);
void deal(const Op&, const Pass&, const Worker&);
void expert_linear(const Op&, const Pass&, const Worker&);
void expert_silu_mul(const Op&, const Pass&, const Worker&);
void mix(const Op&, const Pass&, const Worker&);
