/* A block pool: its memory, and its operations, which `pool.c` implements. `pool_type.c` makes it a Python type. */
#ifndef QUIPU_POOL_H
#define QUIPU_POOL_H

#include "index.h"
#include "native.h"

#define MAX_QUEUE_ENTRIES 4 /* as in eviction_queue.py */

typedef struct {
    PyObject_HEAD
    PyObject *observers;
    uint32_t num_blocks;
    int32_t *references;
    int64_t *pending;      /* the step that is writing a block; 0 (COMMITTED) if there is none */
    int32_t *pin_counts;   /* pins of a block */
    uint32_t *num_entries; /* entries of a block in the queue */
    uint8_t *has_key;
    Index index;
    uint32_t *blank;   /* a stack */
    uint32_t *queue;   /* a ring buffer of queue_room entries, a power of two */
    uint32_t *scratch; /* the blocks of an argument */
    uint32_t *tags;    /* those of its keys */
    uint32_t queue_room, queue_first, queue_length;
    uint32_t num_blank, num_cached, num_owned, num_pinned_only;
    uint64_t num_evicted;
} Pool;

/* Methods of the type, named as in block_pool.py. */
PyObject *pool_match(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_share(Pool *pool, PyObject *argument);
PyObject *pool_unshare(Pool *pool, PyObject *argument);
PyObject *pool_take(Pool *pool, PyObject *argument);
PyObject *pool_next_evicted(Pool *pool, PyObject *argument);
PyObject *pool_release(Pool *pool, PyObject *argument);
PyObject *pool_pin(Pool *pool, PyObject *argument);
PyObject *pool_unpin(Pool *pool, PyObject *argument);
PyObject *pool_is_freed_by(Pool *pool, PyObject *argument);
PyObject *pool_is_written(Pool *pool, PyObject *argument);
PyObject *pool_publish(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_commit(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_unpublish(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_holds(Pool *pool, PyObject *argument);
PyObject *pool_reset(Pool *pool, PyObject *argument);

/* Return a list of block numbers, and the key of a block that has one. */
PyObject *block_list(const uint32_t *blocks, Py_ssize_t count);
PyObject *key_object(const Pool *pool, uint32_t block);

/* Returns the block of entry i of the queue; 0 is the next to be popped. */
static inline uint32_t *queue_at(const Pool *pool, uint32_t i) {
    return pool->queue + ((pool->queue_first + i) & (pool->queue_room - 1));
}

#endif
