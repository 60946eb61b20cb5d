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
    int64_t out_width;  // linear: columns of y
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t x_stride, y_stride, z_stride;
    float eps;
    float scale;
    const float* x;
    const float* z;  // second argument: what linear adds, the values of write_kv
    const void* weight;
    const float* bias;
    const float* cos;
    const float* sin;
    float* y;
    void* keys;    // one layer's cache, [block, kv head, slot, head_dim]
    void* values;
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
struct Worker {
    int thread;
    int num_threads;
    int64_t* counter;
    int64_t next() const { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
};

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
