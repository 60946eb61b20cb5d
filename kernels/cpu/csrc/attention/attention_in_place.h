// Attention of a few query rows per head, with keys and values multiplied where they are in the cache: what a step that
// decodes does. Used by attention_bf16.cpp.
//
// Such a step is as fast as memory is. Blocks are scattered, so a piece has several heads: what they have in a block is
// adjacent, and is read as one run, block by block, first the keys of a chunk and then its values.
//
// What must always hold: the bits are those of a piece with one head, over packed copies of keys and values.
#pragma once
#include "attention_rows.h"
#include "pairs_in_place.h"

namespace {

constexpr int64_t kRowsInPlace = kMaxRows;
// kSlots slots of a head: where they are in the keys and in the values, and the first of them counted from the chunk's.
struct Part {
    int64_t offset, head, slot;
};

// Lists what a piece reads in a chunk, in the order of memory within each block.
void list_parts(const Op& op, const Pass& pass, const Piece& piece, int64_t chunk, std::vector<Part>& parts) {
    int64_t bytes = head_bytes(op.stored, pass.block_size, op.width), slot_bytes = op.width * (op.stored == kInt8 ? 1 : 2);
    parts.clear();
    for (int64_t at = chunk, end = std::min(chunk + kChunk, piece.end); at < end;) {
        int64_t first = at % pass.block_size, last = std::min(pass.block_size, first + end - at);
        int64_t block = pass.tables[pass.table_start[piece.sequence] + at / pass.block_size];
        for (int64_t h = 0; h < piece.num_heads; h++)
            for (int64_t slot = first; slot < last; slot += kSlots)
                parts.push_back({(block * op.num_kv_heads + piece.head + h) * bytes + slot * slot_bytes, h, at - chunk + slot - first});
        at += last - first;
    }
}

// Lists the parts of each chain of values, in the order of their first. A chain whose second part the piece does not reach has
// its first twice.
void order_values(const std::vector<Part>& parts, int64_t num_heads, std::vector<int64_t>& order) {
    static thread_local std::vector<int64_t> begun;  // of each head
    begun.resize(num_heads);
    order.clear();
    for (int64_t i = 0; i < static_cast<int64_t>(parts.size()); i++) {
        int64_t within = parts[i].slot % kValueSlots / kSlots;
        if (within == 0) {
            begun[parts[i].head] = order.size();
            order.insert(order.end(), kPartsOfChain, i);
        } else {
            order[begun[parts[i].head] + within] = i;
        }
    }
}

// What a chunk reads, in order: its keys, its values, and the keys of the chunk after it.
struct Reads {
    const char *keys, *values;
    std::vector<Part> parts, next;
    std::vector<int64_t> order;  // of values
    int64_t num_keys() const { return parts.size(); }
    int64_t num_values() const { return order.size(); }
    // Returns where part `i` is, from here on; past the last, a part that has been read.
    const char* at(int64_t i) const {
        if (i < num_keys()) return keys + parts[i].offset;
        i -= num_keys();
        if (i < num_values()) return values + parts[order[i]].offset;
        i -= num_values();
        return keys + (i < static_cast<int64_t>(next.size()) ? next[i] : parts[0]).offset;
    }
};

template <class T>
void score_keys(const Reads& reads, const Query* queries, PieceRows& rows) {
    for (int64_t i = 0; i < reads.num_keys(); i += kTogether) {
        KeyPart<T> some[kTogether];
        int64_t n = std::min(kTogether, reads.num_keys() - i);
        for (int64_t j = 0; j < n; j++) {
            int64_t row = reads.parts[i + j].head * rows.rows;
            some[j] = {reinterpret_cast<const T*>(reads.at(i + j)), queries + row * rows.stride,
                       rows.scores(row) + reads.parts[i + j].slot, reads.at(i + j + kTogether)};
        }
        bool are_run = n == kTogether && rows.piece.num_heads >= kTogether;
        add_keys_in_place(some, n, are_run, rows.stride, rows.rows, rows.op.width);
    }
}

// Slots from `written` on are read as zeros.
template <class T>
void add_values(const Reads& reads, int64_t written, PieceRows& rows) {
    const T *zeros = reinterpret_cast<const T*>(rows.scratch.zeros.data()), *slots[kValueSlots];
    const char* ahead[kTogether];
    for (int64_t i = 0; i < reads.num_values(); i += kPartsOfChain) {
        if (i % kTogether == 0)
            for (int64_t j = 0; j < kTogether; j++) ahead[j] = reads.at(reads.num_keys() + i + kTogether + j);
        const Part& first = reads.parts[reads.order[i]];
        for (int64_t j = 0; j < kValueSlots; j++) {
            const Part& part = reads.parts[reads.order[i + j / kSlots]];
            const T* values = reinterpret_cast<const T*>(reads.values + part.offset);
            slots[j] = first.slot + j < written ? values + j % kSlots * rows.op.width : zeros;
        }
        int64_t row = first.head * rows.rows;
        add_values_in_place(rows.weights(row) + first.slot, rows.rows, slots, rows.op.width, rows.results(row), rows.stride, ahead,
                            i % kTogether / kPartsOfChain);
    }
}

// `next` is this thread's next piece, or null: its first keys are prefetched.
template <class T>
void attend_in_place(const Op& op, const Pass& pass, const Piece& piece, const Piece* next) {
    if (!is_needed(op, pass, piece)) return;
    static thread_local Scratch scratch;
    static thread_local Reads reads;
    PieceRows rows(op, pass, piece, scratch);
    rows.start();
    const Query* queries = rows.all_queries((Query*)nullptr);
    reads.keys = static_cast<const char*>(op.keys);
    reads.values = static_cast<const char*>(op.values);
    list_parts(op, pass, piece, piece.start, reads.parts);
    for (int64_t chunk = piece.start; chunk < piece.end; chunk += kChunk) {
        reads.next.clear();
        if (chunk + kChunk < piece.end) list_parts(op, pass, piece, chunk + kChunk, reads.next);
        else if (next) list_parts(op, pass, *next, next->start, reads.next);
        order_values(reads.parts, piece.num_heads, reads.order);
        score_keys<T>(reads, queries, rows);
        for (int64_t h = 0; h < piece.num_heads; h++) rows.weigh(h, chunk);
        add_values<T>(reads, std::min(kChunk, piece.end - chunk), rows);
        std::swap(reads.parts, reads.next);
    }
    rows.finish();
}

}  // namespace
