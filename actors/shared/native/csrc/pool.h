/* A pool of blocks: its memory, and what can be done to it. For `pool.c`, which does it, and `pool_type.c`, which makes a
 * Python type of it. */
#ifndef QUIPU_POOL_H
#define QUIPU_POOL_H

#include "index.h"
#include "native.h"

#define MAX_PLACES 4 /* as there */

typedef struct {
    PyObject_HEAD
    PyObject *observers;
    uint32_t num_blocks;
    int32_t *references;
    int64_t *pending;  /* the step that writes a block; 0 (COMMITTED) where none has yet to */
    int32_t *owners;   /* pins that a block is part of */
    uint32_t *places;  /* how often it stands in the queue */
    uint8_t *has_key;
    Index index;
    uint32_t *blank;   /* a stack */
    uint32_t *queue;   /* a ring of queue_room places, a power of two */
    uint32_t *scratch; /* the blocks of an argument */
    uint32_t queue_room, queue_first, queue_length;
    uint32_t num_blank, num_cached, num_owned, num_pinned_only;
    uint64_t num_evicted;
} Pool;

/* Methods of the type, named as in block_pool.py. */
PyObject *pool_match(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_share(Pool *pool, PyObject *argument);
PyObject *pool_unshare(Pool *pool, PyObject *argument);
PyObject *pool_take(Pool *pool, PyObject *argument);
PyObject *pool_release(Pool *pool, PyObject *argument);
PyObject *pool_pin(Pool *pool, PyObject *argument);
PyObject *pool_unpin(Pool *pool, PyObject *argument);
PyObject *pool_num_unpinned(Pool *pool, PyObject *argument);
PyObject *pool_is_freed_by(Pool *pool, PyObject *argument);
PyObject *pool_is_written(Pool *pool, PyObject *argument);
PyObject *pool_publish(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_commit(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_unpublish(Pool *pool, PyObject *const *args, Py_ssize_t num_args);
PyObject *pool_holds(Pool *pool, PyObject *argument);
PyObject *pool_reset(Pool *pool, PyObject *argument);

/* A list of block numbers; the key of a block that has one. */
PyObject *block_list(const uint32_t *blocks, Py_ssize_t count);
PyObject *key_object(const Pool *pool, uint32_t block);

/* The block at place i of the queue, 0 the next to be looked at. */
static inline uint32_t *queue_at(const Pool *pool, uint32_t i) {
    return pool->queue + ((pool->queue_first + i) & (pool->queue_room - 1));
}

#endif
