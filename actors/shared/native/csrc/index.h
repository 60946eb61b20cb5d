/* Maps a key to its block: a hash table with open addressing over the keys of a pool's blocks. For `pool.h` only.
 *
 * What must always hold: an entry's block has the key that it was inserted with; there is no empty slot between an
 * entry and its home slot. The seed is private to the process, so that clients cannot choose keys with the same home
 * slot. */
#ifndef QUIPU_INDEX_H
#define QUIPU_INDEX_H

#include "native.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t tag;   /* part of the key's hash: gives the home slot and rules out most other keys */
    uint32_t block; /* 0, the null block, marks an empty slot */
} Entry;

typedef struct {
    uint8_t (*keys)[KEY_BYTES]; /* by block */
    Entry *entries;
    uint32_t mask;
    uint64_t seed;
} Index;

/* Returns 0 if there is not enough memory. */
static inline int index_make(Index *index, uint32_t num_blocks, uint64_t seed) {
    uint32_t size = 8;
    while (size < 2 * num_blocks) size *= 2;
    index->keys = malloc((size_t)num_blocks * KEY_BYTES);
    index->entries = calloc(size, sizeof(Entry));
    index->mask = size - 1;
    index->seed = seed;
    return index->keys && index->entries;
}

static inline void index_free(Index *index) {
    free(index->keys);
    free(index->entries);
}

static inline void index_clear(Index *index) { memset(index->entries, 0, ((size_t)index->mask + 1) * sizeof(Entry)); }

static inline uint32_t index_tag(const Index *index, const uint8_t *key) {
    uint64_t words[KEY_BYTES / 8], hash = index->seed;
    memcpy(words, key, KEY_BYTES);
    for (int i = 0; i < KEY_BYTES / 8; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return (uint32_t)hash;
}

/* Has the home slot of a tag, or of a block's key if it has one, fetched from memory. */
static inline void index_fetch(const Index *index, uint32_t tag) {
    __builtin_prefetch(index->entries + (tag & index->mask), 1);
}

static inline void index_fetch_block(const Index *index, uint32_t block) {
    index_fetch(index, index_tag(index, index->keys[block]));
}

/* Returns the slot of a key's entry, or the empty slot where it would be inserted. */
static inline Entry *index_find(const Index *index, const uint8_t *key, uint32_t tag) {
    for (uint32_t at = tag & index->mask;; at = (at + 1) & index->mask) {
        Entry *entry = index->entries + at;
        if (!entry->block || (entry->tag == tag && !memcmp(index->keys[entry->block], key, KEY_BYTES))) return entry;
    }
}

static inline void index_put(Index *index, Entry *empty, const uint8_t *key, uint32_t tag, uint32_t block) {
    empty->tag = tag;
    empty->block = block;
    memcpy(index->keys[block], key, KEY_BYTES);
}

/* Removes a block's entry and closes the gap: entries after it move up, none of them before its home slot. */
static inline void index_remove(Index *index, uint32_t block) {
    uint32_t gap = index_tag(index, index->keys[block]) & index->mask;
    while (index->entries[gap].block != block) gap = (gap + 1) & index->mask;
    for (uint32_t at = (gap + 1) & index->mask; index->entries[at].block; at = (at + 1) & index->mask) {
        uint32_t home = index->entries[at].tag & index->mask;
        if (((at - home) & index->mask) < ((at - gap) & index->mask)) continue;
        index->entries[gap] = index->entries[at];
        gap = at;
    }
    index->entries[gap].block = 0;
}

#endif
