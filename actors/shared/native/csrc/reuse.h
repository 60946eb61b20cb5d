/* A sketch of how blocks are used again: `ReuseSketch` of cache_insight/reuse_sketch.py in C. For `reuse.c` and
 * `reuse_type.c` only.
 *
 * What must always hold: the same counts as there after the same calls; the time of a call is bounded by its keys and,
 * where the sample is made smaller, by `max_keys`. */
#ifndef QUIPU_REUSE_H
#define QUIPU_REUSE_H

#include "native.h"

#include <stdint.h>

#define NUM_BINS 528           /* of distances: 16 exact ones, then 16 for each power of two */
#define MAX_SAMPLED_IN_CALL 1024
#define MAX_SHIFT 24
#define SCALE_BITS 27          /* `sum` counts in units of 2^-27: no register exceeds it */
#define NO_PLACE UINT32_MAX

typedef struct {
    uint64_t key; /* the first 8 bytes of a block's key, 0: empty */
    uint32_t place; /* its last use, on the timeline */
    uint32_t used_at; /* likewise, in seconds */
    uint32_t owner;
} Tracked;

typedef struct {
    PyObject_HEAD
    uint32_t max_keys, num_keys, mask, shift, next_place, num_places, register_bits;
    Tracked *table;
    uint64_t *timeline; /* by place: the key that was last used there, 0 if it was used later */
    uint32_t *tree; /* Fenwick tree of how many keys were last used at each place */
    uint8_t *registers; /* HyperLogLog: of the largest rank seen */
    uint64_t sum; /* over 2^-register */
    uint64_t num_queries;
    double num_new;
    uint64_t bins[NUM_BINS];
} Sketch;

int sketch_make(Sketch *sketch, uint32_t max_keys, uint32_t register_bits);
void sketch_free(Sketch *sketch);

/* The methods of the Python class. */
PyObject *sketch_access(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args);
PyObject *sketch_touch(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args);
PyObject *sketch_idle(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args);

#endif
