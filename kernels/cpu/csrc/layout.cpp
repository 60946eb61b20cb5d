// The compiled layout of the structs of program.h; ../program.py compares it with its own at load.
#include <cstddef>

#include "program.h"
#include "linear/low_rank.h"
#include "linear/quantized.h"

namespace {

struct Field {
    const char* name;  // null after the last one
    int64_t offset;
    int64_t size;
};

}  // namespace

#define FIELD(type, name) {#name, offsetof(type, name), sizeof(type::name)}
#define OP(name) FIELD(Op, name)
#define PASS(name) FIELD(Pass, name)
#define LOW_RANK(name) FIELD(LowRank, name)
#define PART(name) FIELD(LowRankPart, name)
#define MATRIX(name) FIELD(QuantizedMatrix, name)

static const Field kOp[] = {
    OP(kind), OP(on_logits_rows), OP(stored), OP(no_barrier), OP(width), OP(out_width), OP(num_heads), OP(num_kv_heads),
    OP(x_stride), OP(y_stride), OP(z_stride), OP(window), OP(num_experts), OP(num_chosen), OP(num_groups), OP(num_chosen_groups), OP(first), OP(num_multiplied), OP(narrow_stride), OP(drawn_columns), OP(eps), OP(scale),
    OP(soft_cap), OP(normalise), OP(activation), OP(fused_rope), OP(x_rounded), OP(y_rounded), OP(interleaved), OP(in_chunks), OP(by_score), OP(x), OP(z), OP(weight), OP(bias), OP(cos), OP(sin),
    OP(y), OP(keys), OP(values), OP(matrices), OP(dispatch), OP(norm), OP(key_norm), OP(v), OP(scratch), OP(raw), OP(pass), OP(joined),
    {nullptr, sizeof(Op), 0},
};

static const Field kPass[] = {
    PASS(num_tokens), PASS(num_logits), PASS(num_sequences), PASS(block_size), PASS(num_threads), PASS(token_ids),
    PASS(positions), PASS(blocks), PASS(logits_indices), PASS(query_start), PASS(tables), PASS(table_start),
    PASS(adapted_tokens), PASS(adapted_starts), PASS(adapted_logits), PASS(adapted_logits_starts), PASS(num_adapters),
    {nullptr, sizeof(Pass), 0},
};

static const Field kMatrix[] = {
    MATRIX(width), MATRIX(group_size), MATRIX(num_groups), MATRIX(bits), MATRIX(halves), MATRIX(byte_products),
    MATRIX(has_lowest), MATRIX(e2m1), MATRIX(codes), MATRIX(scales), MATRIX(offsets), {nullptr, sizeof(QuantizedMatrix), 0},
};

static const Field kLowRankFields[] = {
    LOW_RANK(num_vecs), LOW_RANK(num_parts), LOW_RANK(stored), LOW_RANK(a), LOW_RANK(parts), {nullptr, sizeof(LowRank), 0},
};

static const Field kLowRankPart[] = {
    PART(first_panel), PART(num_panels), PART(first), PART(rank), PART(place), PART(b), {nullptr, sizeof(LowRankPart), 0},
};

extern "C" const void* quipu_layout(int32_t which) {
    static const Field* const layouts[] = {kOp, kPass, kMatrix, kLowRankFields, kLowRankPart};
    return layouts[which];
}
