/* `BlockPool` of block_pool.py in C: the same blocks in the same order for the same calls.
 *
 * That file and those of its parts (eviction_queue.py, pinned_blocks.py) document each function; names are the same.
 * The state is a handful of arrays indexed by block number, so that a block costs a few cache lines and no object.
 *
 * What must always hold: for any call, the result and the state are those of the Python class. Arguments are read
 * completely before anything is changed. */
#include "pool.h"

#define AHEAD 8 /* blocks whose entries are fetched from memory while others are looked at */

/* ---------------------------------------------------------------- arguments and results */

/* Copies the blocks of a sequence to the scratch. Returns their number, or -1 with an exception. */
static Py_ssize_t read_blocks(Pool *pool, PyObject *sequence) {
    PyObject *list = PyList_Check(sequence) ? Py_NewRef(sequence) : PySequence_List(sequence);
    if (!list) return -1;
    Py_ssize_t count = PyList_Size(list);
    if (count >= (Py_ssize_t)pool->num_blocks) {
        PyErr_SetString(PyExc_ValueError, "more blocks than the pool has");
        count = -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long block = PyLong_AsLong(PyList_GetItem(list, i));
        if (block < 1 || block >= (long)pool->num_blocks) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "no block %ld", block);
            count = -1;
        } else pool->scratch[i] = (uint32_t)block;
    }
    Py_DECREF(list);
    return count;
}

PyObject *block_list(const uint32_t *blocks, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(blocks[i]);
        if (number) PyList_SetItem(list, i, number);
        else Py_CLEAR(list);
    }
    return list;
}

PyObject *key_object(const Pool *pool, uint32_t block) {
    return PyBytes_FromStringAndSize((const char *)pool->index.keys[block], KEY_BYTES);
}

/* ---------------------------------------------------------------- the queue of cached blocks */

static uint32_t queue_pop(Pool *pool) {
    uint32_t block = *queue_at(pool, 0);
    pool->queue_first++;
    pool->queue_length--;
    pool->num_entries[block]--;
    return block;
}

static void queue_push(Pool *pool, uint32_t block) {
    *queue_at(pool, pool->queue_length++) = block;
    pool->num_entries[block]++;
}

static void queue_push_front(Pool *pool, uint32_t block) {
    pool->queue_first--;
    pool->queue_length++;
    *queue_at(pool, 0) = block;
    pool->num_entries[block]++;
}

/* Returns whether a block that was just popped can be evicted. */
static int is_at_last_place(const Pool *pool, uint32_t block) {
    return !pool->num_entries[block] && !pool->references[block] && pool->has_key[block];
}

static void tidy_queue(Pool *pool) {
    for (uint32_t left = pool->queue_length; left; left--) {
        uint32_t block = queue_pop(pool);
        if (is_at_last_place(pool, block)) queue_push(pool, block);
    }
}

/* ---------------------------------------------------------------- keys */

static void forget_key(Pool *pool, uint32_t block) {
    index_remove(&pool->index, block);
    pool->has_key[block] = 0;
}

/* ---------------------------------------------------------------- taking and releasing */

PyObject *pool_match(Pool *pool, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "match takes 2 arguments, got %zd", num_args);
    Py_ssize_t limit = PyLong_AsSsize_t(args[1]), count = 0;
    if (limit == -1 && PyErr_Occurred()) return NULL;
    PyObject *keys = PyList_Check(args[0]) ? Py_NewRef(args[0]) : PySequence_List(args[0]);
    if (!keys) return NULL;
    Py_ssize_t num_keys = PyList_Size(keys);
    if (limit > num_keys) limit = num_keys;
    if (limit >= (Py_ssize_t)pool->num_blocks) limit = pool->num_blocks - 1;
    for (; count < limit; count++) {
        const uint8_t *key = key_bytes(PyList_GetItem(keys, count));
        if (!key) {
            Py_DECREF(keys);
            return NULL;
        }
        uint32_t block = index_find(&pool->index, key, index_tag(&pool->index, key))->block;
        if (!block) break;
        pool->scratch[count] = block;
    }
    Py_DECREF(keys);
    return block_list(pool->scratch, count);
}

PyObject *pool_share(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block = pool->scratch[i];
        int32_t held = pool->references[block]++;
        if (!held) pool->num_cached--;
        else if (held == 1 && pool->pin_counts[block]) pool->num_pinned_only--;
    }
    Py_RETURN_NONE;
}

PyObject *pool_unshare(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block = pool->scratch[i];
        int32_t held = --pool->references[block];
        if (!held) pool->num_cached++;
        else if (held == 1 && pool->pin_counts[block]) pool->num_pinned_only++;
    }
    Py_RETURN_NONE;
}

/* Tells the observers, if there is anything to tell. Steals the reference to the keys. */
static int tell_removed(const Pool *pool, PyObject *keys) {
    int failed = !keys;
    Py_ssize_t num_observers = failed || !PyList_Size(keys) ? 0 : PyList_Size(pool->observers);
    for (Py_ssize_t i = 0; i < num_observers && !failed; i++) {
        PyObject *answer = PyObject_CallMethod(PyList_GetItem(pool->observers, i), "on_removed", "O", keys);
        failed = !answer;
        Py_XDECREF(answer);
    }
    Py_XDECREF(keys);
    return failed ? -1 : 0;
}

/* Evicts the `count` cached blocks that were freed first, into `blocks`. There must be that many. Returns what
 * observers have to be told. */
static PyObject *evict(Pool *pool, uint32_t *blocks, Py_ssize_t count) {
    int is_watched = PyList_Size(pool->observers) > 0;
    Py_ssize_t room = is_watched ? count : 0, num_told = 0;
    PyObject *keys = PyList_New(room);
    for (Py_ssize_t i = 0; i < count;) {
        if (pool->queue_length > AHEAD) index_fetch_block(&pool->index, *queue_at(pool, AHEAD));
        uint32_t block = queue_pop(pool);
        if (!is_at_last_place(pool, block)) continue;
        blocks[i++] = block;
        if (keys && is_watched && !pool->pending[block]) {
            PyObject *key = key_object(pool, block);
            if (key) PyList_SetItem(keys, num_told++, key);
            else Py_CLEAR(keys);
        }
        pool->pending[block] = 0;
        forget_key(pool, block);
    }
    pool->num_cached -= (uint32_t)count;
    pool->num_evicted += (uint64_t)count;
    if (keys && num_told < room && PyList_SetSlice(keys, num_told, room, NULL)) Py_CLEAR(keys);
    return keys;
}

PyObject *pool_take(Pool *pool, PyObject *argument) {
    Py_ssize_t count = PyLong_AsSsize_t(argument), num_free = (Py_ssize_t)pool->num_blank + pool->num_cached;
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (count < 0 || count > num_free)
        return PyErr_Format(PyExc_ValueError, "%zd blocks asked for, %zd are free", count, num_free);
    Py_ssize_t num_blank = count < (Py_ssize_t)pool->num_blank ? count : (Py_ssize_t)pool->num_blank;
    for (Py_ssize_t i = 0; i < num_blank; i++) pool->scratch[i] = pool->blank[--pool->num_blank];
    PyObject *removed = NULL;
    if (count > num_blank) removed = evict(pool, pool->scratch + num_blank, count - num_blank);
    for (Py_ssize_t i = 0; i < count; i++) pool->references[pool->scratch[i]] = 1;
    PyObject *blocks = block_list(pool->scratch, count); /* observers may call back, which uses the scratch */
    if (count > num_blank && tell_removed(pool, removed)) Py_CLEAR(blocks);
    return blocks;
}

PyObject *pool_next_evicted(Pool *pool, PyObject *argument) {
    Py_ssize_t count = PyLong_AsSsize_t(argument);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (count < 0) return PyErr_Format(PyExc_ValueError, "the next %zd blocks", count);
    if (count > (Py_ssize_t)pool->num_cached) count = pool->num_cached;
    for (Py_ssize_t i = 0; i < count;) {
        uint32_t block = queue_pop(pool);
        if (is_at_last_place(pool, block)) pool->scratch[i++] = block;
    }
    PyObject *found = PyDict_New();
    for (Py_ssize_t i = count; i--;) queue_push_front(pool, pool->scratch[i]);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        uint32_t block = pool->scratch[i];
        if (pool->pending[block]) continue;
        PyObject *key = key_object(pool, block), *number = PyLong_FromUnsignedLong(block);
        int failed = !key || !number || PyDict_SetItem(found, key, number);
        Py_XDECREF(key), Py_XDECREF(number);
        if (failed) Py_CLEAR(found);
    }
    return found;
}

static void release_one(Pool *pool, uint32_t block) {
    int32_t held = --pool->references[block];
    if (held == 1 && pool->pin_counts[block]) pool->num_pinned_only++;
    if (held) return;
    if (pool->has_key[block]) {
        queue_push(pool, block);
        pool->num_cached++;
    } else pool->blank[pool->num_blank++] = block;
}

static void release_all(Pool *pool, Py_ssize_t count) {
    while (count--) release_one(pool, pool->scratch[count]);
    if (pool->queue_length > MAX_QUEUE_ENTRIES * pool->num_blocks) tidy_queue(pool);
}

PyObject *pool_release(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    release_all(pool, count);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- pins */

PyObject *pool_pin(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block = pool->scratch[i];
        if (pool->pin_counts[block]++) continue;
        pool->num_owned++;
        if (!pool->references[block]++) {
            pool->num_cached--;
            pool->num_pinned_only++;
        }
    }
    Py_RETURN_NONE;
}

PyObject *pool_unpin(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks), num_gone = 0;
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block = pool->scratch[i];
        if (--pool->pin_counts[block]) continue;
        pool->num_owned--;
        if (pool->references[block] == 1) pool->num_pinned_only--;
        pool->scratch[num_gone++] = block;
    }
    release_all(pool, num_gone);
    Py_RETURN_NONE;
}

PyObject *pool_is_freed_by(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    while (count--) {
        if (pool->pin_counts[pool->scratch[count]] > 1) Py_RETURN_FALSE;
        if (pool->references[pool->scratch[count]] == 1) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

PyObject *pool_is_written(Pool *pool, PyObject *blocks) {
    Py_ssize_t count = read_blocks(pool, blocks);
    if (count < 0) return NULL;
    while (count--)
        if (pool->pending[pool->scratch[count]]) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

/* ---------------------------------------------------------------- publication */

PyObject *pool_publish(Pool *pool, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "publish takes 3 arguments, got %zd", num_args);
    Py_ssize_t count = read_blocks(pool, args[0]);
    long long step = PyLong_AsLongLong(args[2]);
    if (count < 0 || PyErr_Occurred()) return NULL;
    PyObject *keys = PyList_Check(args[1]) ? Py_NewRef(args[1]) : PySequence_List(args[1]);
    if (!keys) return NULL;
    if (PyList_Size(keys) != count) {
        PyErr_Format(PyExc_ValueError, "%zd blocks and %zd keys", count, PyList_Size(keys));
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *key = key_bytes(PyList_GetItem(keys, i));
        if (!key) goto failed;
        pool->tags[i] = index_tag(&pool->index, key);
    }
    int is_all = 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t block = pool->scratch[i], tag = pool->tags[i];
        const uint8_t *key = key_bytes(PyList_GetItem(keys, i));
        if (i + AHEAD < count) index_fetch(&pool->index, pool->tags[i + AHEAD]);
        Entry *entry = pool->has_key[block] ? NULL : index_find(&pool->index, key, tag);
        if (!entry || entry->block) {
            is_all = 0;
            continue;
        }
        index_put(&pool->index, entry, key, tag, block);
        pool->has_key[block] = 1;
        pool->pending[block] = step;
    }
    Py_DECREF(keys);
    return PyBool_FromLong(is_all);
failed:
    Py_DECREF(keys);
    return NULL;
}

PyObject *pool_commit(Pool *pool, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "commit takes 2 arguments, got %zd", num_args);
    Py_ssize_t count = read_blocks(pool, args[0]);
    long long step = PyLong_AsLongLong(args[1]);
    PyObject *runs = count < 0 || PyErr_Occurred() ? NULL : PyList_New(0);
    if (!step) count = 0; /* nothing is pending for COMMITTED */
    for (Py_ssize_t begin = 0, end; runs && begin < count; begin = end + 1) {
        for (end = begin; end < count && pool->pending[pool->scratch[end]] == step; end++)
            pool->pending[pool->scratch[end]] = 0;
        if (begin == end) continue;
        PyObject *run = PyObject_CallFunction((PyObject *)&PyRange_Type, "nn", begin, end);
        if (!run || PyList_Append(runs, run)) Py_CLEAR(runs);
        Py_XDECREF(run);
    }
    return runs;
}

PyObject *pool_unpublish(Pool *pool, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "unpublish takes 2 arguments, got %zd", num_args);
    long block = PyLong_AsLong(args[0]);
    long long step = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (block < 1 || block >= (long)pool->num_blocks) return PyErr_Format(PyExc_IndexError, "no block %ld", block);
    if (!pool->has_key[block] || !step || pool->pending[block] != step) Py_RETURN_NONE;
    pool->pending[block] = 0;
    forget_key(pool, (uint32_t)block);
    if (!pool->references[block]) {
        pool->num_cached--;
        pool->blank[pool->num_blank++] = (uint32_t)block;
    }
    Py_RETURN_NONE;
}

PyObject *pool_holds(Pool *pool, PyObject *argument) {
    const uint8_t *key = key_bytes(argument);
    if (!key) return NULL;
    return PyBool_FromLong(index_find(&pool->index, key, index_tag(&pool->index, key))->block != 0);
}

PyObject *pool_reset(Pool *pool, PyObject *nothing) {
    (void)nothing;
    tidy_queue(pool);
    while (pool->queue_length) pool->blank[pool->num_blank++] = queue_pop(pool);
    pool->num_cached = 0;
    index_clear(&pool->index);
    memset(pool->has_key, 0, pool->num_blocks);
    memset(pool->pending, 0, pool->num_blocks * sizeof *pool->pending);
    for (Py_ssize_t i = 0; i < PyList_Size(pool->observers); i++) {
        PyObject *answer = PyObject_CallMethod(PyList_GetItem(pool->observers, i), "on_cleared", NULL);
        if (!answer) return NULL;
        Py_DECREF(answer);
    }
    Py_RETURN_NONE;
}
